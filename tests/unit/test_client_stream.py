"""The stream of buckets: what overlaps, what memory it takes, what it does with a source that is not as declared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from weightpush_client.align import Outgoing
from weightpush_client.sources import TensorSource
from weightpush_client.stream import BucketStream, Buffers
from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.manifest import TensorSpec, build_manifest
from weightpush_protocol.messages import DigestKind

WEIGHTS = {f"t{number}": torch.full((16,), number, dtype=torch.uint8) for number in range(6)}


class Recorded(TensorSource):
    """Says when each tensor was asked for; can yield other pairs than those it declared."""

    def __init__(self, asked: Callable[[str], None], pairs: list[tuple[str, torch.Tensor]] | None = None) -> None:
        super().__init__(WEIGHTS.items())
        self._asked = asked
        self._pairs = list(WEIGHTS.items()) if pairs is None else pairs

    def identity(self, name: str) -> Hashable | None:
        return None

    def tensors(
        self, names: Sequence[str], sent: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._pairs:
            self._asked(name)
            yield name, tensor


def stream_of(source: TensorSource, deliver: Callable[..., None], **options: Any) -> BucketStream:
    """Return a stream with one tensor a bucket."""
    specs = source.specs()
    return BucketStream(
        source,
        [Outgoing(held=spec, sent=spec) for spec in specs],
        build_manifest(specs, options.pop("bucket_bytes", 1)),
        deliver=deliver,
        **{
            "interrupt": lambda: None,
            "delivered": lambda number: None,
            "digest": DigestKind.WP64,
            "device": torch.device("cpu"),
            "buffers": Buffers(),
        }
        | options,
    )


def test_the_next_bucket_is_gathered_while_one_is_sent_and_the_one_after_it_is_not() -> None:
    next_gathered = threading.Event()
    asked: list[str] = []

    def note(name: str) -> None:
        asked.append(name)
        if name == "t1":
            next_gathered.set()

    def deliver(number: int, buffer: torch.Tensor, digests: bytes) -> None:
        if number == 0:
            assert next_gathered.wait(5)
        # Were the third gathered already, it would lie in this very buffer.
        assert len(asked) <= number + 2
        assert buffer.tolist() == [number] * 16
        assert digests.hex() == tensor_digest(buffer)

    done: list[int] = []
    stream_of(Recorded(note), deliver, delivered=done.append).run()
    assert done == list(range(6))


def test_two_buffers_are_all_and_serve_again() -> None:
    addresses: list[int] = []
    buffers = Buffers()
    for _ in range(2):
        stream_of(TensorSource(WEIGHTS.items()), lambda _, b, __: addresses.append(b.data_ptr()), buffers=buffers).run()
    assert len(set(addresses)) == 2
    assert addresses == [*addresses[:2]] * 6


def test_a_larger_bucket_gets_larger_buffers_and_a_failure_gives_them_up() -> None:
    buffers = Buffers()
    (small,) = buffers.take(1, 10, torch.device("cpu"), pinned=False)
    assert buffers.take(1, 8, torch.device("cpu"), pinned=False)[0] is small
    large = buffers.take(2, 20, torch.device("cpu"), pinned=False)
    assert [buffer.numel() for buffer in large] == [20, 20]

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), buffers.dropped_on_failure():
        stream_of(TensorSource(WEIGHTS.items()), fail, buffers=buffers).run()
    assert buffers.take(1, 1, torch.device("cpu"), pinned=False)[0].numel() == 1


def test_a_failure_stops_the_gathering_and_interrupts() -> None:
    asked: list[str] = []
    interrupted = threading.Event()

    def fail(number: int, *_: object) -> None:
        if number == 1:
            raise WeightPushError(ErrorCode.TRANSPORT_FAILED, "cable cut")

    with pytest.raises(WeightPushError, match="cable cut"):
        stream_of(Recorded(asked.append), fail, interrupt=interrupted.set).run()
    assert interrupted.is_set()
    assert len(asked) <= 3


def test_a_failure_of_the_source_waits_for_the_interrupted_delivery() -> None:
    interrupted = threading.Event()
    sending = threading.Event()
    ended = threading.Event()

    def hang(*_: object) -> None:
        sending.set()
        assert interrupted.wait(5)
        ended.set()

    def broken(name: str) -> None:
        if name == "t2":
            assert sending.wait(5)
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        stream_of(Recorded(broken), hang, interrupt=interrupted.set, bucket_bytes=32).run()
    assert ended.is_set()


@pytest.mark.case("C19", "C20")
@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([*WEIGHTS.items()][:-1], "the source ended before tensor 6 of 6, 't5'"),
        ([*WEIGHTS.items()][::-1], "tensor 1 of 6 changed since the push began: declared 't0' uint8 .*, found 't5'"),
        ([("t0", torch.zeros(4, 4, dtype=torch.uint8))], r"declared 't0' uint8 \[16\], found 't0' uint8 \[4, 4\]"),
        ([("t0", torch.zeros(16, dtype=torch.int8))], r"found 't0' int8 \[16\]"),
    ],
)
def test_the_first_divergence_from_the_manifest_is_named(pairs: list[tuple[str, torch.Tensor]], message: str) -> None:
    source = Recorded(lambda _: None, pairs)
    with pytest.raises(WeightPushError, match=message) as caught:
        stream_of(source, lambda *_: None).run()
    assert caught.value.code is ErrorCode.WEIGHTS_REJECTED


def test_without_digests_none_are_computed() -> None:
    seen: list[bytes] = []
    source = TensorSource([("a", torch.ones(4)), ("e", torch.empty(0))])
    spec = TensorSpec.of("a", torch.ones(4))
    assert source.specs()[0] == spec
    stream_of(source, lambda _, __, digests: seen.append(digests), digest=DigestKind.NONE, bucket_bytes=64).run()
    assert seen == [b""]
