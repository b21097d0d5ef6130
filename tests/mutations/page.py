"""Of the server's page: what it hides, what it counts, what it asks for, and what a browser may run. They need chromium."""

from .mutation import Mutation, mutations

TESTS = "tests/serving/server/test_page.py"
TEXT = f"{TESTS}::test_a_text_and_its_steps_are_those_of_the_api"
SAFE = f"{TESTS}::test_generated_text_stays_text_and_hides_nothing"
READABLE = f"{TESTS}::test_readable_on_a_narrow_screen_in_both_schemes"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/serving/server/page.html",
        TEXT,
        {
            "page-lets-characters-hide": ("split(/([\\p{Cc}\\p{Cf}\\p{Cs}", "split(/([\\p{Cc}\\p{Cs}", SAFE),
            "page-replaces-no-draft": ("if (i > passed || last", "if (i >= passed || last"),
            "page-counts-what-was-tested": ("accepted(step) > i).length;", "accepted(step) >= i).length;"),
            "page-shows-the-step-after": ('mark(view.index + 1);\n  $("context")', 'mark(view.index);\n  $("context")'),
            "page-compares-with-drafts": (
                "{ ...body, num_drafts: 0 }",
                "{ ...body }",
                f"{TESTS}::test_switches_reach_the_request",
            ),
            "page-does-not-stop": (
                '  if (event.key === "Escape") abort?.abort();\n',
                "",
                f"{TESTS}::test_stopping_cancels",
            ),
            "page-keeps-a-key-for-ever": (
                'sessionStorage.setItem("specdec-key"',
                'localStorage.setItem("specdec-key"',
                f"{TESTS}::test_a_key_is_asked_for_where_one_is_needed",
            ),
            "page-tells-kinds-apart-by-colour-alone": (
                "text-decoration-style: wavy",
                "text-decoration-style: solid",
                READABLE,
            ),
        },
    ),
    *mutations(
        "python/specdec/serving/server/page.py",
        SAFE,
        {
            "page-may-run-any-script": ('f"script-src {script}"', "f\"script-src 'unsafe-inline'\""),
            "page-without-its-hash": ("element[1].encode()", "element[0].encode()"),
        },
    ),
]
