"""openvino-genai's continuous batching: ``python -m benchmarks.rivals_genai MODEL THREADS [PROPERTY=VALUE...]``.

Runs in the environment of openvino-genai. MODEL is a GGUF file, or a directory that `rivals_genai_weights` wrote;
the properties are those of OpenVINO's CPU plugin.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from benchmarks.rivals_driver import Job, serve

__all__: list[str] = []


def main(model: str, threads: str, *properties: str) -> None:
    """Load the model and do jobs."""
    genai: Any = importlib.import_module("openvino_genai")  # only its own environment has it
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = 32
    scheduler.cache_size = 2
    plugin = {"INFERENCE_NUM_THREADS": threads, **dict(text.split("=", 1) for text in properties)}
    if model.endswith(".gguf"):
        pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", plugin)
    else:
        tokenizer = genai.Tokenizer(f"{model}/model.gguf")
        pipeline = genai.ContinuousBatchingPipeline(model, tokenizer, scheduler, "CPU", **plugin)
    tokenizer = pipeline.get_tokenizer()

    def compute(job: Job) -> None:
        config = genai.GenerationConfig(
            max_new_tokens=job.output_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        handles = []
        for index, prompt in enumerate(job.prompts):
            ids = tokenizer.encode(prompt, add_special_tokens=False).input_ids
            job.prompt_tokens[index] = ids.shape[1]
            handles.append(pipeline.add_request(index, ids, config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        job.token(index, len(output.generated_ids))

    serve(compute)


if __name__ == "__main__":
    main(*sys.argv[1:])
