"""Options beyond the usual ones: each changes the answer as it should, or is a 400 that says so."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_worker import FAIL
from gateway_builders import byte_level_tokenizer, make_card
from test_gateway_http import CHAT, TEXT, check_error, events, on_app

from dovetail.errors import ContextTooLong, InvalidRequest
from dovetail.gateway.http.api import CompletionRequest
from dovetail.gateway.http.ollama.request import OllamaChat, OllamaMessage
from dovetail.gateway.http.responses.request import ResponsesRequest, responses_chat
from dovetail.gateway.http.sampling import SamplingBody, neutral_values, sampling_values
from dovetail.gateway.service import Service
from dovetail.gateway.text.infill import infill_prompt
from dovetail.gateway.text.token_table import TokenTable
from dovetail.gateway.text.translate import translate_completion
from dovetail.types import GenerationDefaults, Slo

UNSUPPORTED: list[dict[str, Any]] = [
    {"functions": [{"name": "f"}]},
    {"function_call": "auto"},
    {"modalities": ["audio"]},
    {"chat_template": "{{ messages }}"},
    {"typical_p": 0.5},
]


# Within bounds, and with an effect: of each parameter of the table.
GIVEN: dict[str, float] = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5,
                           "presence_penalty": 1.0, "frequency_penalty": -1.0}  # fmt: skip


def test_every_api_passes_every_sampling_parameter_of_the_table_on() -> None:
    assert GIVEN.keys() == SamplingBody.model_fields.keys()
    bodies = [
        CompletionRequest(prompt="x", **GIVEN),
        responses_chat(ResponsesRequest(input="x", **GIVEN), ()),
        OllamaChat(model="m", messages=[OllamaMessage(role="user", content="x")], options=GIVEN).as_chat(),
    ]
    for body in bodies:
        assert sampling_values(body, GenerationDefaults()) == GIVEN


def test_what_authors_recommend_holds_for_parameters_that_a_request_leaves_out() -> None:
    recommended = GenerationDefaults(temperature=0.3, top_k=-1, repetition_penalty=1.1)
    values = sampling_values(CompletionRequest(prompt="x", temperature=0.0, top_p=0.0), recommended)
    assert values == {"temperature": 0.0, "top_p": 1e-6, "top_k": 0, "repetition_penalty": 1.1}


def test_a_beam_search_takes_of_sampling_parameters_neutral_values_alone() -> None:
    for name, neutral in neutral_values().items():
        for value in neutral:
            CompletionRequest(prompt="x", use_beam_search=True, **{name: value})
        with pytest.raises(InvalidRequest, match=name):
            CompletionRequest(prompt="x", use_beam_search=True, **{name: GIVEN[name]})


def test_options_that_are_not_there_are_a_400_that_names_them(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for change in UNSUPPORTED:
            (name,) = change
            error = check_error(await client.post("/v1/chat/completions", json=CHAT | change), 400, name)
            assert "not supported" in error["message"]
        error = check_error(await client.post("/v1/completions", json=TEXT | {"temprature": 0}), 400, "temprature")
        assert "did you mean 'temperature'?" in error["message"]
        check_error(await client.post("/v1/completions", json=TEXT | {"priority": -1}), 400, "priority")
        odd = {"prediction": {"type": "guess", "content": "x"}}
        check_error(await client.post("/v1/chat/completions", json=CHAT | odd), 400, "prediction.type")

    on_app(tmp_path, test)


def test_harmless_options_nulls_and_neutral_values_are_accepted(tmp_path: Path) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "safety_identifier": "x", "request_id": "r"}
    neutral = {"use_beam_search": False, "modalities": ["text"], "length_penalty": 1.0, "functions": None}
    nulls = {"temperature": None, "stop": None, "n": None, "tools": None, "stream_options": None, "unheard_of": None}

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = CHAT | harmless | neutral | nulls | {"reasoning_effort": "low"}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text

    on_app(tmp_path, test)


def test_what_gateways_send_along_is_accepted_and_named_in_the_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent: dict[str, Any] = {
        "cache_control": {"type": "ephemeral"},
        "usage": {"include": True},
        "verbosity": "low",
        "provider": {"order": ["x"]},
        "session_id": "s",
    }

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for name, value in sent.items():
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
                answer = (await client.post(path, json=body | {name: value})).json()
                assert [note.split()[0] for note in answer["warnings"]] == [name]
                first, *rest = events(await client.post(path, json=body | {name: value, "stream": True}))
                assert first["warnings"] == answer["warnings"]
                assert not any("warnings" in chunk for chunk in rest)
        assert "warnings" not in (await client.post("/v1/chat/completions", json=CHAT)).json()

    caplog.set_level("INFO", "dovetail.requests")
    on_app(tmp_path, test)
    lines = [record.getMessage() for record in caplog.records if "verbosity changes nothing" in record.getMessage()]
    assert len(lines) == 4  # one of each request


def test_thoughts_are_switched_by_any_name_that_clients_have_for_it(tmp_path: Path) -> None:
    shows = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ enable_thinking }}{{ reasoning_effort }}]"
    on: list[dict[str, Any]] = [
        {"enable_thinking": True},
        {"thinking": {"type": "enabled"}},
        {"thinking": True},
        {"reasoning": {"enabled": True}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ]

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        async def said(change: dict[str, Any]) -> str:
            body = CHAT | {"model": "shows", "max_tokens": 40} | change
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            content: str = response.json()["choices"][0]["message"]["content"]
            return content[: content.find("]") + 1]

        for change in on:
            assert await said(change) == "hi[True]"
        for change in (
            {"enable_thinking": False},
            {"thinking": {"type": "disabled"}},
            {"reasoning": {"enabled": False}},
        ):
            assert await said(change) == "hi[False]"
        assert await said({"reasoning": {"effort": "low"}}) == "hi[low]"

    on_app(tmp_path, test, make_card(tmp_path / "shows", "shows", chat_template=shows, eos_token_ids=()))


def test_a_chat_gets_what_is_left_of_the_context_and_a_completion_is_told(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for name in ("max_tokens", "max_completion_tokens"):
            answer = (await client.post("/v1/chat/completions", json=CHAT | {name: 32_000})).json()
            assert "has up to 506: the context is 512" in answer["warnings"][0]
        long = CHAT | {"messages": [{"role": "user", "content": "x" * 600}]}
        error = check_error(await client.post("/v1/chat/completions", json=long), 400, "messages")
        assert error["code"] == "context_length_exceeded"
        long_text = TEXT | {"max_tokens": 32_000}
        check_error(await client.post("/v1/completions", json=long_text), 400, "max_tokens")
        answer = (await client.post("/v1/completions", json=long_text | {"clamp_max_tokens": True})).json()
        assert "the context is 512" in answer["warnings"][0]
        refused = CHAT | {"max_tokens": 32_000, "clamp_max_tokens": False}
        check_error(await client.post("/v1/chat/completions", json=refused), 400, "max_tokens")
        model = service.models.get("fake")
        for clamps in (True, False):
            told = copy.copy(model)
            told.config = model.config.model_copy(update={"clamp_max_tokens": clamps})
            body = CompletionRequest(model="fake", prompt=["a", "bcd"], max_tokens=32_000)
            if clamps:
                job = await translate_completion(body, told, "id", 512, Slo())
                assert [request.sampling.max_tokens for request in job.requests] == [509, 509]
            else:
                with pytest.raises(ContextTooLong):
                    await translate_completion(body, told, "id", 512, Slo())

    on_app(tmp_path, test)


def test_words_and_tokens_that_are_barred_reach_the_worker_as_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        model = service.models.get("fake")
        await model.prepare()
        body = CompletionRequest(model="fake", prompt="a", bad_words=["hi"], allowed_token_ids=[5, 5, 9])
        (request,) = (await translate_completion(body, model, "id", 512, Slo())).requests
        sampling = request.sampling
        assert sampling.allowed_token_ids == (5, 9)
        texts = {model.tokenizer.table.decode(word, skip_special_tokens=True) for word in sampling.bad_words}
        assert texts == {"hi", " hi"}
        for change, param in (
            ({"allowed_token_ids": [300]}, "allowed_token_ids"),
            ({"allowed_token_ids": []}, "allowed_token_ids"),
            ({"allowed_token_ids": [5] * 4097}, "allowed_token_ids"),
            ({"bad_words": [""]}, "bad_words"),
            ({"bad_words": ["x" * 65]}, "bad_words"),
            ({"bad_words": ["x"] * 1025}, "bad_words"),
        ):
            check_error(await client.post("/v1/completions", json=TEXT | change), 400)
            error = (await client.post("/v1/completions", json=TEXT | change)).json()["error"]
            assert error["param"].startswith(param)

    on_app(tmp_path, test)


def test_every_wrong_key_of_a_bias_is_named_and_how_many_tokens_there_are(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        response = await client.post("/v1/completions", json=TEXT | {"logit_bias": {"one": 1, "5": 1, "99999": 1}})
        message = check_error(response, 400, "logit_bias")["message"]
        assert all(part in message for part in ("'one'", "'99999'", "300"))
        assert "'5'" not in message

    on_app(tmp_path, test)


def test_a_prompt_is_cut_to_its_end_where_the_caller_says_so(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = TEXT | {"prompt": "x" * 600 + "ab", "max_tokens": 4}  # the context has 512
        check_error(await client.post("/v1/completions", json=body), 400, "prompt")
        for keep, prompt_tokens in ((2, 2), (1000, None), (-1, 508)):
            response = await client.post("/v1/completions", json=body | {"truncate_prompt_tokens": keep})
            if prompt_tokens is None:
                check_error(response, 400, "prompt")
            else:
                assert response.json()["usage"]["prompt_tokens"] == prompt_tokens
        response = await client.post("/v1/completions", json=body | {"truncate_prompt_tokens": 2})
        assert response.json()["choices"][0]["text"] == "abab"
        right = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
        response = await client.post("/v1/completions", json=body | right)
        assert response.json()["choices"][0]["text"] == "xxxx"
        check_error(await client.post("/v1/completions", json=body | {"truncate_prompt_tokens": 0}), 400)

    on_app(tmp_path, test)


def test_a_prompt_of_any_length_is_cut_where_the_caller_says_so(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        long = "x" * 2_000_000 + "ab"  # no token is so long that this could fit
        for side, text in (("left", "abab"), ("right", "xxxx")):
            cut = {"max_tokens": 4, "truncate_prompt_tokens": 2, "truncation_side": side}
            for prompt in (long, [long[-40_000:]] * 40):
                response = await client.post("/v1/completions", json=TEXT | cut | {"prompt": prompt})
                assert {choice["text"] for choice in response.json()["choices"]} == {text}, response.text
        items = [{"role": "user", "content": "x" * 100_000} for _ in range(20)]
        asked = {"model": "fake", "input": items, "max_output_tokens": 4, "store": False}
        check_error(await client.post("/v1/responses", json=asked), 400, "messages")
        response = await client.post("/v1/responses", json=asked | {"truncation": "auto"})
        assert response.json()["usage"]["input_tokens"] == 508  # of a context of 512

    on_app(tmp_path, test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_come_with_the_text_whole_and_streamed(tmp_path: Path, path: str) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = (TEXT if path == "/v1/completions" else CHAT) | {"return_token_ids": True}
        whole = (await client.post(path, json=body)).json()
        choice = whole["choices"][0]
        prompt = choice["prompt_token_ids"] if path == "/v1/completions" else whole["prompt_token_ids"]
        assert len(prompt) == whole["usage"]["prompt_tokens"]
        assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
        chunks = events(await client.post(path, json=body | {"stream": True}))
        first = chunks[0]["choices"][0] if path == "/v1/completions" else chunks[0]
        assert first["prompt_token_ids"] == prompt
        streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert streamed == choice["token_ids"]
        plain = (await client.post(path, json=body | {"return_token_ids": False})).json()
        assert "token_ids" not in plain["choices"][0]
        assert (plain["choices"][0] if path == "/v1/completions" else plain)["prompt_token_ids"] is None

    on_app(tmp_path, test)


def test_logprobs_name_tokens_by_their_ids_where_asked(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        options = {"return_tokens_as_token_ids": True}
        answer = (await client.post("/v1/completions", json=TEXT | {"logprobs": 1} | options)).json()
        assert all(name.startswith("token_id:") for name in answer["choices"][0]["logprobs"]["tokens"])
        chat = CHAT | {"logprobs": True, "top_logprobs": 1} | options
        entry = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["logprobs"]["content"][0]
        assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{entry['token'].split(':')[1]}"

    on_app(tmp_path, test)


def test_text_offsets_count_characters_and_not_halves_of_them(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = TEXT | {"prompt": "é日x", "logprobs": 0, "max_tokens": 6}  # two, three and one byte, a token each
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == "é日x"
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2]
        chunks = events(await client.post("/v1/completions", json=body | {"stream": True}))
        streamed = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
        assert streamed == [0, 0, 1, 1, 1, 2]

    on_app(tmp_path, test)


def test_usage_can_come_with_every_chunk(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        chunks = events(await client.post("/v1/chat/completions", json=CHAT | options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert chunks[-1]["choices"] == []

    on_app(tmp_path, test)


def test_a_chat_can_give_back_the_text_that_it_goes_on_with(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once "}]
        options = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        for echo in (True, False):
            body = CHAT | options | {"echo": echo}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"].startswith("Once ") == echo
            chunks = events(await client.post("/v1/chat/completions", json=body | {"stream": True}))
            text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
            assert text == answer["choices"][0]["message"]["content"]

    on_app(tmp_path, test)


def test_tokenize_counts_a_conversation_as_the_chat_does(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once upon"}]
        for options in (
            {},
            {"add_generation_prompt": False},
            {"continue_final_message": True},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        ):
            chat = await client.post("/v1/chat/completions", json=CHAT | {"messages": messages} | options)
            body = {"model": "fake", "messages": messages} | options
            counted = (await client.post("/tokenize", json=body)).json()["count"]
            assert counted == chat.json()["usage"]["prompt_tokens"], options

    on_app(tmp_path, test)


def test_probes_may_ask_with_head(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for path in ("/health", "/live", "/version", "/v1/models"):
            assert (await client.head(path)).status_code == 200

    on_app(tmp_path, test)


def test_an_echo_has_log_probabilities_as_the_rest_of_the_text_has(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = TEXT | {"prompt": "é-x", "echo": True, "logprobs": 1, "max_tokens": 3}
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        logprobs = whole["logprobs"]
        assert whole["text"] == "é-xé-"
        assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.5, -0.5, -0.5]
        assert logprobs["top_logprobs"][0] is None
        written = zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True)
        assert all(next(iter(top)) == token for token, top in written)  # the token itself first, as vLLM has it
        assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 3, 4]
        chunks = events(await client.post("/v1/completions", json=body | {"stream": True}))
        for name, values in logprobs.items():
            assert [v for chunk in chunks for v in chunk["choices"][0]["logprobs"][name]] == values
        body |= {"max_tokens": 0, "n": 2}
        alone = (await client.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in alone["choices"]] == ["é-x", "é-x"]
        assert [choice["logprobs"]["token_logprobs"] for choice in alone["choices"]] == [
            [None, -0.25, -0.25, -0.25]
        ] * 2
        assert alone["usage"]["completion_tokens"] == 0

    on_app(tmp_path, test)


def test_log_probabilities_of_the_prompt_come_by_token(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        answer = (await client.post("/v1/completions", json=TEXT | {"prompt": "ab", "prompt_logprobs": 1})).json()
        first, second = answer["choices"][0]["prompt_logprobs"]
        assert first is None
        (chosen,) = [entry for entry in second.values() if entry["decoded_token"] == "b"]
        assert (chosen["logprob"], chosen["rank"]) == (-0.25, 7)
        assert second["0"]["rank"] == 1
        chat = (await client.post("/v1/chat/completions", json=CHAT | {"prompt_logprobs": 0})).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        # Where there are none that is said too: clients of vLLM look at it.
        assert (await client.post("/v1/chat/completions", json=CHAT)).json()["prompt_logprobs"] is None
        assert (await client.post("/v1/completions", json=TEXT)).json()["choices"][0]["prompt_logprobs"] is None

    on_app(tmp_path, test)


def test_best_of_keeps_the_likeliest_and_counts_all(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = TEXT | {"best_of": 3, "n": 2, "logprobs": 0, "prompt": ["ab", "cd"], "max_tokens": 2}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "cd", "cd"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        likelihoods = [choice["logprobs"]["token_logprobs"][0] for choice in answer["choices"]]
        assert likelihoods == [-0.5, -1.5, -0.5, -1.5]  # the third choice of each is the least likely
        assert answer["usage"]["completion_tokens"] == 12
        del body["logprobs"]
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"] is None

    on_app(tmp_path, test)


def test_a_beam_search_answers_with_its_best_texts_in_order(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = TEXT | {"prompt": ["ab", "cd"], "max_tokens": 3, "use_beam_search": True, "n": 2, "logprobs": 1}
        response = await client.post("/v1/completions", json=body)
        answer = response.json()
        # The fake worker says the prompt again, or else token 0, which is infinitely unlikely.
        assert [choice["text"] for choice in answer["choices"]][::2] == ["aaa", "ccc"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
        assert answer["choices"][1]["logprobs"]["token_logprobs"][-1] == -9999.0
        counts = {name: count for name, count in answer["usage"].items() if not name.endswith("_details")}
        assert counts == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
        assert float(response.headers["x-dovetail-first-token-ms"]) > 0
        kept = (await client.post("/v1/completions", json=body | {"n": 1, "best_of": 2})).json()
        assert [choice["text"] for choice in kept["choices"]] == ["aaa", "ccc"]
        chat = (await client.post("/v1/chat/completions", json=CHAT | {"use_beam_search": True, "n": 2})).json()
        assert len(chat["choices"]) == 2
        assert service.unfinished == 0

    on_app(tmp_path, test)


def test_what_a_beam_search_cannot_do_is_a_400_that_names_it(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        wrong: dict[str, Any] = {
            "stream": True, "temperature": 0.5, "top_p": 0.5, "stop": ["x"], "n": 33, "allowed_token_ids": [1],
            "structured_outputs": {"regex": "a"}, "repetition_penalty": 1.1,
        }  # fmt: skip
        for name, value in wrong.items():
            body = TEXT | {"use_beam_search": True, name: value}
            check_error(await client.post("/v1/completions", json=body), 400, name)
        check_error(await client.post("/v1/completions", json=TEXT | {"length_penalty": 2}), 400, "length_penalty")
        failing = TEXT | {"use_beam_search": True, "prompt": [[97], [FAIL]]}
        assert (await client.post("/v1/completions", json=failing)).status_code == 500
        assert service.unfinished == 0

    on_app(tmp_path, test)


def test_chosen_tokens_are_told_of_instead_of_the_likeliest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = CompletionRequest(**TEXT | {"logprobs": 0, "logprob_token_ids": [5, 7, 5]})
        job = await translate_completion(body, service.models.get("fake"), "j", 512, Slo())
        assert job.requests[0].sampling.logprob_token_ids == (5, 7)
        for change in ({"logprob_token_ids": [1]}, {"logprobs": 0, "logprob_token_ids": [300]}):
            check_error(await client.post("/v1/completions", json=TEXT | change), 400, "logprob_token_ids")

    on_app(tmp_path, test)


def test_an_echo_is_the_text_that_was_sent_and_shows_every_id_that_was(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = TEXT | {"echo": True, "max_tokens": 2, "logprobs": 0, "prompt": "<|user|>hé"}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["text"].startswith("<|user|>hé")
        assert choice["logprobs"]["text_offset"][:4] == [0, 8, 9, 9]
        ids = (await client.post("/v1/completions", json=body | {"prompt": [257, 257]})).json()["choices"][0]
        assert ids["text"] == "<|user|><|user|>"  # and what is answered hides them
        assert ids["logprobs"]["text_offset"] == [0, 8, 16, 16]
        cut = body | {"prompt": "<|user|>abc", "truncate_prompt_tokens": 2}
        assert (await client.post("/v1/completions", json=cut)).json()["choices"][0]["text"].startswith("bc")

    on_app(tmp_path, test)


@pytest.mark.parametrize(
    ("marks", "wanted"),
    [
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>ab<fim_suffix>yz<fim_middle>"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]yz[PREFIX]ab"),
    ],
)
def test_a_model_with_marks_for_it_fills_in_the_middle(marks: list[str], wanted: str) -> None:
    tokenizer = byte_level_tokenizer()
    before, after = (tokenizer.encode(text).ids for text in ("ab", "yz"))
    with pytest.raises(InvalidRequest, match="filling in the middle"):
        infill_prompt(TokenTable.of(tokenizer), before, after, "m")
    tokenizer.add_tokens(marks)
    assert tokenizer.decode(infill_prompt(TokenTable.of(tokenizer), before, after, "m")) == wanted


def test_the_tokenizer_tells_of_itself(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        check_error(await client.get("/tokenizer_info"), 400, "model")
        info = (await client.get("/tokenizer_info?model=fake")).json()
        assert info["eos_token"] == "<|end|>"
        assert "<|end|>" in info["added_tokens_decoder"].values()
        assert (info["knows_tools"], info["tool_format"]) == (False, "hermes")

    on_app(tmp_path, test)


def test_what_is_in_memory_is_also_told_as_ollamas_clients_read_it(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        assert (await client.get("/api/ps")).json()["models"] == []
        await client.post("/v1/completions", json=TEXT)
        status = (await client.get("/api/ps")).json()
        (model,) = status["models"]
        assert (model["name"], model["model"], model["size_vram"]) == ("fake", "fake", 0)
        assert status["nodes"][0]["models"][0]["name"] == "fake"  # and as ours do

    on_app(tmp_path, test)


def test_what_the_authors_recommend_is_told_with_the_model(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        assert (await client.get("/v1/models/fake")).json()["default_sampling_params"] == {}

    on_app(tmp_path, test)
