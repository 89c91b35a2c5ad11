"""Names and numbers that identify things. Types only; no behaviour."""

from __future__ import annotations

from typing import NewType

ModelId = NewType("ModelId", str)
NamespaceId = NewType("NamespaceId", str)
SessionId = NewType("SessionId", str)
RequestId = NewType("RequestId", str)
#: One run of one choice of a request on one replica. Never reused.
SequenceId = NewType("SequenceId", str)
ReplicaId = NewType("ReplicaId", str)
RouterId = NewType("RouterId", str)
LeaseId = NewType("LeaseId", str)
PoolId = NewType("PoolId", str)
#: One reader of a pool's blocks (namespaces/holds.py). Never reused.
HoldId = NewType("HoldId", str)
GeometryId = NewType("GeometryId", str)
#: 16 bytes of a keyed chain hash; equal hashes mean equal content (see namespaces/hashing.py).
BlockHash = NewType("BlockHash", bytes)
#: Index in units of a geometry's block_bytes from the start of the arena's data.
BlockIndex = NewType("BlockIndex", int)
ExtentIndex = NewType("ExtentIndex", int)
Epoch = NewType("Epoch", int)
