"""A stand-in for vLLM's extraction: writes what ``FAKE_STATES`` holds, a step late, as vLLM does.

``FAKE_VLLM`` names what it plays: ``right``, ``cached`` (says that a prefix was), ``refuses``
(cannot load), ``dies`` (in the second batch), ``forgets`` (writes no file), ``torn`` (half a file),
``other`` (states of other tokens), ``zeros`` (the first rows were not computed).
"""

import json
import os
import sys
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import load_file, save_file

PLAYED = os.environ["FAKE_VLLM"]
__version__ = "0.32.0"


class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings


class LLM:
    def __init__(self, **arguments):
        if PLAYED == "refuses":
            raise ValueError("Model architecture is not supported for extraction")
        connector = arguments["kv_transfer_config"]
        self.folder = connector["kv_connector_extra_config"]["shared_storage_path"]
        os.makedirs(self.folder)
        with open(os.environ["FAKE_STATES"] + ".json", "w") as file:
            json.dump(arguments, file)
        assert connector["kv_connector_module_path"] == "host_states_connector"
        self.states = load_file(os.environ["FAKE_STATES"])
        self.pending = []
        self.count = 0

    def generate(self, inputs, sampling, use_tqdm=True):
        sys.stdout.write("INFO: a line of vLLM's own\n")
        for file, ids in self.pending:
            self.save(file, ids)
        self.pending = []
        outputs = []
        for entry in inputs:
            ids = entry["prompt_token_ids"]
            file = os.path.join(self.folder, f"{self.count}.safetensors")
            self.count += 1
            self.pending.append((file, ids))
            outputs.append(
                SimpleNamespace(
                    kv_transfer_params={"hidden_states_path": file},
                    num_cached_tokens=16 if PLAYED == "cached" else 0,
                )
            )
        if PLAYED == "dies" and self.count > 12:
            sys.stderr.write("Illegal instruction, says the engine\n")
            sys.stderr.flush()
            os._exit(132)
        return outputs

    def save(self, file, ids):
        if PLAYED == "forgets":
            return
        name = "-".join(map(str, ids))
        if name not in self.states:  # the short request that follows every batch
            states = np.ones((len(ids), 1, 1), dtype=np.float32)
        else:
            states = self.states[name].copy()
        if PLAYED == "zeros":
            states[:4] = 0
        if PLAYED == "other":
            ids = [*ids[1:], ids[0]]
        save_file({"hidden_states": states, "token_ids": np.array(ids, dtype=np.int64)}, file)
        if PLAYED == "torn":
            with open(file, "r+b") as torn:
                torn.truncate(os.path.getsize(file) // 2)
