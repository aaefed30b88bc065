"""A small, complete RL run: GRPO with rollouts from live vLLM servers that get the new weights after every step.

Read it in this order: `task` (what is to be learnt), `learning` (the arithmetic), `rollouts` (asking the servers),
`trainer` (the actor that trains and pushes), `run` (the loop), `report` (what must hold at the end).
"""
