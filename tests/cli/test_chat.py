"""``specdec chat``, its lines piped in."""

from __future__ import annotations

import json
import signal

import pytest
from specdec import Output, Producer, Request, SpeculativeDecoder
from specdec.cli import app
from specdec.cli.conversation import Conversation
from specdec.cli.one_row import CHUNK, GROWTH, OneRow
from specdec.cli.talk import Talk
from support.commands import rows
from typer.testing import CliRunner

from specdec_kernels import SamplingParams

SHORT = ("--max-new-tokens", "8", "--device", "cpu")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def chat(*lines: str, options=SHORT):
    result = CliRunner().invoke(app, ["chat", *options], input="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def template(pair, monkeypatch):
    """The embedded tokenizer with a chat template."""
    monkeypatch.setattr(pair[2], "chat_template", TEMPLATE)
    monkeypatch.setattr("specdec.models.load.loading.load_embedded_pair", lambda *_, **__: pair)
    return pair


@pytest.fixture
def quick(pair, monkeypatch):
    monkeypatch.setattr("specdec.models.load.loading.load_embedded_pair", lambda *_, **__: pair)


@pytest.mark.usefixtures("quick")
def test_text_goes_on(tmp_path):
    """Without a template the second answer continues all that was said before."""
    first = rows("def f(x):", "--max-new-tokens", 8)[0]["text"]
    second = rows(f"def f(x):{first}\nimport ", "--max-new-tokens", 8)[0]["text"]
    saved = tmp_path / "said.json"
    result = chat("def f(x):", "", "import ", f"/save {saved}")
    assert result.stdout == f"{first}\n{second}\n"
    assert result.stderr.count("8 tokens in ") == 2 and " tokens/s: tau " in result.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert [m["content"] for m in messages] == ["def f(x):", first, "import ", second]


def test_a_template_is_used(template):
    result = chat("/system be brief", "x = 1", "y", "/clear", "y")
    answers, prompt = [], "<system>be brief\n"
    target, draft, tokenizer = template
    decoder = SpeculativeDecoder(target, draft)
    for said in ("x = 1", "y"):
        prompt += f"<user>{said}\n"
        ids = tokenizer(prompt + "<a>", add_special_tokens=False).input_ids
        answers.append(tokenizer.decode(decoder.generate([ids], max_new_tokens=8).tokens[0], skip_special_tokens=True))
        prompt += f"<assistant>{answers[-1]}\n"
    ids = tokenizer("<system>be brief\n<user>y\n<a>", add_special_tokens=False).input_ids
    answers.append(tokenizer.decode(decoder.generate([ids], max_new_tokens=8).tokens[0], skip_special_tokens=True))
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)


@pytest.mark.usefixtures("quick")
def test_commands_reach_the_decoder(monkeypatch):
    made, asked, init, decode = [], [], SpeculativeDecoder.__init__, OneRow.decode
    monkeypatch.setattr(SpeculativeDecoder, "__init__", lambda self, *a, **k: made.append(a) or init(self, *a, **k))
    monkeypatch.setattr(OneRow, "decode", lambda self, *a: asked.append((self.rule, *a)) or decode(self, *a))
    result = chat(
        "/drafter lookup", "/k 2", "/rule coupled", "/temperature 0.8", "/top-k 30", "/top-p 0.9", "/min-p 0.01",
        "/repetition-penalty 1.1", "/presence-penalty 0.1", "/frequency-penalty 0.2", "/seed 7", "/max-new-tokens 3",
        "x", "y", "/stats", "/verbose on", "/k auto", "/drafter none", "z", "/exit", "never",
    )  # fmt: skip
    (rule, first, _), (_, second, _), (_, third, _) = asked
    p = first.params
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == (0.8, 30, 0.9, 0.01)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.1, 0.1, 0.2)
    assert (first.max_new_tokens, rule) == (3, "coupled") and [a.seed for a in (first, second, third)] == [7, 8, 9]
    drafters = [type(a[1] and a[1].drafter).__name__ for a in made]  # what is around it drafts forced tokens
    assert drafters[-1] == "NoneType" and drafters.count("PromptLookupDrafter") == 2
    assert made[-1][2] == 0  # K of plain decoding
    assert "drafter lookup, k 2, rule coupled, seed 9, max-new-tokens 3" in result.stderr
    assert "2 answers, 6 tokens in " in result.stderr and "top-k 30" in result.stderr
    assert "tokens: accepted " in result.stderr  # verbose


@pytest.mark.usefixtures("quick")
def test_wrong_commands_change_nothing():
    wrong = {
        "/abacus 1": "/abacus: got /abacus, allowed: /help, /drafter, /k, ",
        "/drafter abacus": "/drafter: got 'abacus', allowed: model, lookup, suffix",
        "/drafter lookup 2": "/drafter: exit_layers: got 2 with drafter 'lookup', allowed: ",
        "/k -1": "/k: got '-1', allowed: an integer >= 0, or auto",
        "/rule typical": "/rule: rule: got 'typical', allowed: 'token', 'block', 'coupled'",
        "/temperature hot": "/temperature: got 'hot', allowed: a number",
        "/temperature -1": "/temperature: temperature: got -1.0, allowed: 0 (greedy), or 0.001",
        "/top-k 2.5": "/top-k: got '2.5', allowed: an integer",
        "/top-p 2": "/top-p: top_p: got 2.0, allowed: 0 to 1 (1 is off)",
        "/seed 9223372036854775808": "/seed: got '9223372036854775808', allowed: an integer from ",
        "/max-new-tokens 0": "/max-new-tokens: got '0', allowed: an integer >= 1",
        "/system x": "/system: got a text, allowed: none, as this model has no chat template",
        "/verbose maybe": "/verbose: got 'maybe', allowed: on, off",
        "/save": "/save: got no file, allowed: /save FILE",
        "/save /no/such/folder/x": "/save: got '/no/such/folder/x' (No such file or directory), allowed: a file",
    }
    before, *_, after = chat("/stats", *wrong, "/stats").stderr.partition("\n/abacus: ")
    told = chat(*wrong).stderr
    for message in wrong.values():
        assert message in told
    assert after.endswith(before + "\n")


@pytest.mark.usefixtures("quick")
def test_what_does_not_fit_is_told_and_the_chat_goes_on():
    first = rows("x", "--max-new-tokens", 8)[0]["text"]
    result = chat("x " * 2100, "x")
    told = "not answered: prompt: got 2101 tokens with max_new_tokens=8, allowed: 2048 tokens together"
    assert told in result.stderr
    assert result.stdout == first + "\n"


@pytest.mark.usefixtures("quick")
def test_ctrl_c_stops_the_answer_and_keeps_the_chat(monkeypatch, pair):
    decode = OneRow.decode
    presses = [2]  # as many emissions before it is pressed

    def interrupted(self, request, on_emit):
        def emit(emission):
            on_emit(emission)
            presses[0] -= 1
            if presses[0] == 0:
                signal.raise_signal(signal.SIGINT)

        return decode(self, request, emit)

    monkeypatch.setattr(OneRow, "decode", interrupted)
    result = chat("def f(x):", "/stats", "y", options=("--max-new-tokens", "8", "-k", "0", "--device", "cpu"))
    tokenizer = pair[2]
    ids = tokenizer("def f(x):").input_ids
    part = tokenizer.decode(SpeculativeDecoder(pair[0], None, 0).generate([ids], max_new_tokens=3).tokens[0])
    assert result.stdout.startswith(part + "\n") and "(stopped)\n3 tokens in 3 steps" in result.stderr
    assert "1 answers, 3 tokens in 3 steps" in result.stderr  # /stats
    assert "8 tokens in 8 steps" in result.stderr  # the next answer


@pytest.mark.usefixtures("quick")
def test_a_second_ctrl_c_stops_at_once(monkeypatch):
    def interrupted(self, request, on_emit):
        signal.raise_signal(signal.SIGINT)
        on_emit(Output(0, [5], [Producer.BONUS]))
        signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(OneRow, "decode", interrupted)
    result = chat("x", "/stats")
    assert len(result.stdout) > 1 and "(stopped)" in result.stderr and "answers" not in result.stderr
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.usefixtures("quick")
def test_ctrl_c_between_answers(monkeypatch):
    taken, take = [], Talk.take

    def once(self, line):
        taken.append(line)
        if len(taken) == 1:
            raise KeyboardInterrupt
        take(self, line)

    monkeypatch.setattr(Talk, "take", once)
    assert "(/exit or Ctrl-D ends)" in chat("x", "/help").stderr and taken == ["x", "/help"]


@pytest.mark.parametrize("drafter", ("model", "suffix"))
def test_an_answer_reads_only_what_is_new(pair, drafter):
    """Texts and counts are those of new caches. A text with more tokens than there is room for is read anew."""
    target, draft, tokenizer = pair
    decoder = SpeculativeDecoder(target, draft if drafter == "model" else None, 4)
    row, said = OneRow(decoder, "coupled"), tokenizer("def f(x):").input_ids * GROWTH
    prompt, lengths, reused = said[: CHUNK + 9], [], []
    for turn, more in enumerate((CHUNK, GROWTH, 5, 5)):
        request, told = Request(prompt, 6, SamplingParams(0.8), seed=turn, eos_token_id=[]), []
        ours, new = row.decode(request, told.append), decoder.decode([request], "coupled")
        (one,), (other,) = ours.sequences, new.sequences
        assert one.tokens == other.tokens == [token for output in told for token in output.tokens]
        assert (ours.stats.steps, ours.stats.accepted) == (new.stats.steps, new.stats.accepted)
        assert ours.stats.seconds.keys() == new.stats.seconds.keys() and 0 < ours.stats.seconds["total"]
        lengths.append(len(prompt))
        reused.append(one.reused)
        prompt = one.text + said[:more]
    assert reused == [0, CHUNK, 0, (lengths[2] - 1) // CHUNK * CHUNK] and lengths[2] > GROWTH


def test_a_conversation_forgets(template):
    talk = Conversation(template[2])
    empty = talk.prompt("hello")
    talk.add("a", "b")
    assert talk.prompt("hello") != empty
    talk.clear()
    assert talk.prompt("hello") == empty
