"""``specdec.cli.lm_eval_model`` under a shorter name: ``python -m specdec.harness`` is lm_eval's command line."""

try:
    from .cli.lm_eval_model import SpecdecLM, main
except ImportError as error:
    if __name__ == "__main__":
        raise SystemExit(f"specdec.harness: {error}") from error
    raise

__all__ = ["SpecdecLM", "main"]

if __name__ == "__main__":
    main()
