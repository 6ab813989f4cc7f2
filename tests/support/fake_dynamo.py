"""A stand-in for ai-dynamo-runtime, as files on the module path of a child process."""

from pathlib import Path

_CORE = '''
import json
import threading

class Found:
    def __init__(self, scores):
        self.scores = scores

class RadixTree:
    def __init__(self):
        self.local = {}
        self.held = {}
        print("noise of a library")

    def apply_event(self, worker, text):
        data = json.loads(text)["data"]
        held = self.held.setdefault(worker, set())
        for block in data.get("stored", {"blocks": []})["blocks"]:
            self.local[block["tokens_hash"]] = block["block_hash"]
            held.add(block["block_hash"])
        held.difference_update(data.get("removed", {"block_hashes": []})["block_hashes"])

    def find_matches(self, locals_):
        scores = {}
        for worker, held in self.held.items():
            depth = 0
            while depth < len(locals_) and self.local.get(locals_[depth]) in held:
                depth += 1
            scores[worker, 0] = depth + EXTRA
        return Found(scores)

    def remove_worker(self, worker):
        self.held.pop(worker, None)

def compute_block_hash_for_seq(tokens, size):
    return [(1 << 63) + block for block in range(len(tokens) // size)]

class SelectionService:
    """Says that a worker holds all it is asked about once any message of it came, or never."""

    def __init__(self, indexer_threads):
        self.heard = set()

    async def upsert_worker(self, worker):
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()

    def _listen(self, worker):
        import zmq

        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.connect(worker["kv_events_endpoints"][0])
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.recv_multipart()
        self.heard.add(worker["worker_id"])
        socket.close(linger=0)

    async def overlap_scores(self, question):
        assert min(question["block_hashes"]) < 0
        depth = len(question["block_hashes"]) + EXTRA
        return {"workers": [{"worker_id": worker, "device_blocks": depth} for worker in self.heard]}

    def shutdown(self):
        pass
'''


def write_fake_dynamo(folder: Path, *, extra_blocks: int = 0) -> None:
    """Put a package `dynamo` into a folder; with extra blocks it claims so many more than are held."""
    (folder / "dynamo").mkdir()
    (folder / "dynamo" / "__init__.py").write_text("")
    (folder / "dynamo" / "_core.py").write_text(f"EXTRA = {extra_blocks}\n{_CORE}")
