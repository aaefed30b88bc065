"""The contract over NCCL, which takes two GPUs: it refuses two ranks on one device."""

from __future__ import annotations

import threading

import pytest
import torch

from weightpush_protocol.digest import tensor_digest
from weightpush_protocol.errors import ErrorCode, WeightPushError
from weightpush_protocol.transports.collective import CollectiveReceiver, CollectiveSender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL between two ranks needs two NVIDIA GPUs"),
]


@pytest.fixture
def pair() -> tuple[CollectiveSender, CollectiveReceiver]:
    sender = CollectiveSender("nccl", host="127.0.0.1", world_size=2, device="cuda:0")
    receiver = CollectiveReceiver(sender.config, rank=1, device="cuda:1")
    joining = threading.Thread(target=receiver.open, args=(60.0,))
    joining.start()
    sender.open(60.0)
    joining.join(60)
    assert not joining.is_alive()
    return sender, receiver


def test_buckets_arrive_as_they_were_sent(pair: tuple[CollectiveSender, CollectiveReceiver]) -> None:
    sender, receiver = pair
    for number, nbytes in enumerate([1000, 0, 17 * 2**20 + 3, 1]):
        bucket = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda:0")
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:1")
        receiving = threading.Thread(target=receiver.receive, args=(number, buffer, 30.0))
        receiving.start()
        sender.send(number, bucket, 30.0)
        receiving.join(30)
        assert tensor_digest(buffer) == tensor_digest(bucket)
    sender.close()
    receiver.close()


def test_a_sender_without_receiver_times_out_and_the_process_lives(
    pair: tuple[CollectiveSender, CollectiveReceiver],
) -> None:
    sender, receiver = pair
    with pytest.raises(WeightPushError) as caught:
        sender.send(0, torch.zeros(2**25, dtype=torch.uint8, device="cuda:0"), 2.0)
    assert caught.value.code is ErrorCode.TRANSPORT_FAILED
    receiver.abort()
    receiver.close()
    sender.close()
