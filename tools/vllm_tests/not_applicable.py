"""Cases that say nothing about a server of text models, and those that fail by decision, with the reason; the first
pattern that fits counts. Also those whose requests are told to call."""

from __future__ import annotations

ADAPTER = "needs an adapter of a model that is not served"
SKILL = "needs what a larger model says; the one that is served has 135M parameters"
TOKENS = "counts tokens by the tokenizer or the template of another model"
THINKS = "needs a model that thinks aloud"
WORDS = "compares words of an error message; ours names the parameter in its own"
PATHS = "a path of vLLM's own, which neither OpenAI nor other servers have"
WIDTH = "compares with the vectors of another model"
GPT_OSS = "the format of gpt-oss, and tools that the server calls"

RULES: list[tuple[str, str]] = [
    (r"\[.*lora.*\]", ADAPTER),
    (r"test_harmony|test_parsable_context|test_mcp_tools", GPT_OSS),
    (r"prompt_embeds", "prompts as embeddings, which a server of vLLM's must be told to take"),
    (r"_vision|test_lora_resolvers|test_tensorizer", "not about text, or about vLLM's own loading"),
    (r"test_batched_chat|invocations|kv_transfer|test_server_load|enable_response_messages", PATHS),
    (r"test_check_models|test_online.py::test_basic|online.py::test_basic", "the model has a name of its own here"),
    (r"embed/test_online.py::test_(completion_request|base64_embedding|truncate_prompt)|test_online_long_text", WIDTH),
    (r"embed/test_online.py::test_(negative_token_ids|params_not_supported)", WORDS),
    (r"(embed|scoring)/.*::test_(pooling|classify)", PATHS),
    (r"late_interaction", "models that compare token by token, which are not there"),
    (r"scoring/.*::test_score_api_(queries|text|data)|use_activation.*reranker", WIDTH),
    (r"scoring/.*(max_model_len|per_doc_validation)", WORDS),
    (r"scoring/test_cross_encoder_online.py::test_(use_activation|rerank_api)", WIDTH),
    (r"test_return_token_ids.py::test_(chat_completion_with_tool_use|comparison_with)", SKILL),
    (r"test_show_version", "fields of vLLM's own build"),
    (r"test_request_cancellation", "asks for more tokens than the context of the model has"),
    (r"test_chat.py::test_single_chat_session|test_completion.py::test_single_completion", TOKENS),
    (r"test_completion.py::test_completion_streaming", SKILL),
    (r"test_prompt_validation", WORDS),
    (r"test_chat.py::(test_more_than_one|test_response_format_json|test_complex_message)", SKILL),
    (r"test_chat.py::test_structured_outputs_(choice|json|regex)_chat", SKILL),
    (r"test_chat.py::test_long_seed", WORDS),
    (r"test_chat_echo.py::test_(prompt|top)_logprobs", "all log-probabilities of the vocabulary, which are megabytes"),
    (r"test_include_reasoning|test_thinking_token_budget.py|reasoning_tokens|reasoning_item", THINKS),
    (r"function_calling.py::test_function_tool_use\[True|test_function_call.py::test_function_tool_use", THINKS),
    (r"test_function_tool_use\[False-auto|streaming_expected_arguments|streaming_(types|forced.*)\[.*auto", SKILL),
    (r"test_extra_content_fields", "the template and the skill of a model that translates"),
    (r"test_simple.py::test_max_tokens", "the answer of the small model is shorter than the limit"),
    (r"responses/test_basic.py::test_(simple_input|instructions|chat)$|test_simple.py::test_basic", SKILL),
    (r"test_structured_output.py|test_previous_response_id|test_two_responses_with", SKILL),
    (r"test_tool_calls.py|test_parallel_tool_calls.py", SKILL),
    (r"test_messages.py::test_anthropic_streaming_cache_usage", "an option that Anthropic's client no longer has"),
]

# Cases that need a model that calls a tool by itself, which one of 135M parameters does not: their requests say that it
# has to, one call at a time. What is tried is how calls come back, and not the model's wit.
FORCED = r"namespace_tool|test_messages.py::test_anthropic_tool_call"

# What fails by decision: the reason stands beside the failure.
DIFFERENT: list[tuple[str, str]] = [
    (r"test_named_tool_use", "a message that is a call has content null, as OpenAI's; there it is an empty text"),
    (r"stateful.py::test_background$", "says in_progress while it is made, as OpenAI's; there it is queued until then"),
    (
        r"test_messages.py::test_anthropic_streaming$",
        "the first event counts a token of the answer, and cached tokens apart, as Anthropic's; there none, and all",
    ),
    (
        r"test_tokenize_chat_with_tools",
        "a template that drops tools: here the model is told of them in a system message",
    ),
]
