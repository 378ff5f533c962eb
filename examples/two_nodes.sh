#!/bin/bash
# two_nodes.sh [RATE]: how a run over several machines is started. On every node the same command:
#
#   torchrun --nnodes 2 --nproc-per-node 1 --node-rank $NODE_RANK \
#       --master-addr $ADDRESS_OF_NODE_0 --master-port 29500 \
#       -m agentcomm run --codec int8 train.py
#
# or, as before torchrun,
#
#   python -m torch.distributed.launch --nnodes=2 --nproc_per_node=1 --node_rank=$NODE_RANK \
#       --master_addr=... --master_port=29500 -m agentcomm run --codec int8 train.py
#
# This script tries the first on one machine (as root): two network namespaces stand for the nodes,
# joined by links of RATE (100mbit, or none).
set -eu
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-.venv/bin/python}
# The addresses in a namespace have no names, and c10d warns about each.
export TORCH_CPP_LOG_LEVEL=ERROR
exec benchmarks/netlab.sh 2 "${1:-100mbit}" bash -c '
    # What netlab says of ranks is torchrun'"'"'s to say.
    node=$RANK; unset RANK LOCAL_RANK WORLD_SIZE
    exec "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank "$node" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --local-addr 127.0.0.1 \
        -m agentcomm run --codec int8 examples/unchanged.py'
