"""lm-eval's harness: likelihoods and texts of a task of three questions."""

from __future__ import annotations

from common import MODEL, URL, check, run
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

model = LocalCompletionsAPI(
    model=MODEL, base_url=f"{URL}/v1/completions", tokenizer_backend="remote", max_length=2048, batch_size=1
)


def asked(kind: str, *arguments: object) -> Instance:
    return Instance(kind, {}, arguments, 0)  # type: ignore[arg-type]


@check("chat")
def texts() -> None:
    said = model.generate_until([asked("generate_until", "The capital of Germany is", {"max_gen_toks": 6})])
    assert "Berlin" in said[0], said


@check("chat")
def likelihoods() -> None:
    context = "The capital of Germany is"
    right, wrong = model.loglikelihood([asked("loglikelihood", context, end) for end in (" Berlin", " banana")])
    assert right[0] > wrong[0], (right, wrong)


run("lm-eval")
