"""The whole ReTerm loop on one small machine: base → SFT cold start → ReTerm-GRPO → evaluation → report.

Command:   bash launch/quickstart.sh
Hardware:  2 CPU cores, 8 GB, no GPU, no Docker (bubblewrap sandboxes).
Result:    in about 20 minutes a table of Pass@1 and recovery rate for base, SFT and ReTerm-GRPO, and `report.html`.
           Over three seeds ReTerm-GRPO is above SFT by 0.35 in Pass@1 and 0.31 in recovery rate; see the README.

There are no pretrained weights to download, so the quickstart makes its own base model: a Qwen3.5 hybrid of
0.6 million parameters, warmed up on scripted attempts (most of which fail). Everything after that is the method: SFT on
recoveries taken over by an expert, then ReTerm-GRPO. With `model.path` set to a pretrained model there is no warm-up.

Plain GRPO with as many attempts a step:  --config.rl.states=0 --config.rl.tasks=64
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.seed = 0
    # The workdir of a finished run whose model, SFT and their evaluation this one takes over instead of making its own,
    # so that runs which differ in `rl` alone share them; empty: none.
    c.start_from = ""

    c.model = ml_collections.ConfigDict()
    c.model.path = ""  # a Hugging Face directory; empty: the tiny model below
    c.model.hidden = 128
    c.model.layers = 2
    c.model.full_attention_interval = 2  # a Gated DeltaNet layer, then a gated full-attention layer
    c.model.mlp = 384
    c.model.heads = 8  # of the attention layer; with 4 names were copied less reliably (one run each)
    c.model.kv_heads = 4
    c.model.head_dim = 32
    c.model.linear_heads = 4
    c.model.linear_head_dim = 32
    c.model.dtype = "float32"  # compute; bfloat16 on accelerators
    c.model.remat = "auto"  # what a layer keeps for its backward pass: none | dots | full; auto: full in bfloat16
    c.model.chunk_size = 32  # tokens of a DeltaNet chunk; the policy's own default is 64
    # Attention of rows without forks: auto (a fused kernel where the backend has one that works, else blockwise) |
    # blockwise | splash (TPU) | pallas_gpu. The log names the choice.
    c.model.attention = "auto"
    c.model.attention_block = 128  # queries attended at once; the policy's own default is 256

    c.mesh = ml_collections.ConfigDict(dict(data=1, fsdp=1, tensor=1))

    c.tasks = ml_collections.ConfigDict()
    c.tasks.path = ""  # a directory of Harbor tasks with train/ and test/; empty: generated families
    c.tasks.train_per_family = 120
    c.tasks.test_per_family = 8
    # Share of the train tasks for base and SFT; RL has the others, where what it learns cannot be what it remembers.
    c.tasks.sft_share = 0.5  # 1: both have all

    c.sandbox = ml_collections.ConfigDict()
    c.sandbox.kind = "bubblewrap"  # bubblewrap | docker | auto (docker if a daemon answers)
    c.sandbox.concurrent = 48
    # Failure states in which processes were alive (they are not part of a snapshot): skip | keep (recoveries start
    # without them) | restart-listed (started again; states with a program that is not in `restart` are skipped).
    c.sandbox.live_processes = "keep"
    c.sandbox.restart = ()
    c.sandbox.snapshot_mb = 20_000  # all failure states together; beyond it the oldest are given up

    # The paper does not publish its agent limits for training; these fit the tiny tasks.
    c.agent = ml_collections.ConfigDict()
    c.agent.max_turns = 7
    c.agent.max_tokens = 704  # of a whole transcript, the prefix of a recovery included
    c.agent.max_turn_tokens = 64
    c.agent.command_timeout = 5.0
    c.agent.attempt_timeout = 60.0
    c.agent.output_limit = 400
    # Unpublished; content-free, so that the terminal is the only source of information.
    c.agent.retry_message = "not solved yet"
    # Turns of a recovery: fresh (as many as any attempt; an attempt that used all of its own can be recovered) |
    # remaining (those that the failed attempt had left). Unpublished.
    c.agent.recovery_budget = "fresh"

    c.base = ml_collections.ConfigDict()  # warm-up on scripted attempts
    c.base.examples = 1500
    # Versions of each example with other names in each, for a model that has yet to learn to copy names (1: none).
    c.base.renamings = 6
    c.base.epochs = 1
    # Copying is learned for one pool of names after another, and suddenly. With Muon it comes sooner than with AdamW,
    # and with more and smaller updates sooner still.
    c.base.optimizer = "muon"
    c.base.learning_rate = 3e-3
    c.base.batch_rows = 1
    c.base.row_length = 704

    c.sft = ml_collections.ConfigDict()  # cold start on recovery demonstrations
    # Demonstrations to learn from, a .jsonl or .parquet file in the schema of ReTerm-10K; empty: the run collects
    # `examples` of them itself, with the scripted expert of the generated families.
    c.sft.data = ""
    c.sft.examples = 120
    c.sft.renamings = 1
    c.sft.sampled_fraction = 0.5  # demonstrations that take over from the base model's own failures
    c.sft.optimizer = "adamw"
    c.sft.epochs = 2  # sure enough of itself to act, not too sure to explore
    c.sft.learning_rate = 1e-3
    c.sft.batch_rows = 2
    c.sft.row_length = 1024

    for stage in (c.base, c.sft):
        stage.micro_rows = stage.batch_rows
        stage.warmup = 0.05
        stage.schedule = "cosine"
        stage.weight_decay = 0.01
        stage.clip_norm = 1.0
        stage.moments_dtype = "float32"  # of Adam's or Muon's moments; bfloat16 saves memory where it is short

    c.rl = ml_collections.ConfigDict()
    c.rl.name = ""  # of the trained policy in tables; empty: GRPO or ReTerm-GRPO, with its fork point if not the end
    c.rl.steps = 12
    c.rl.tasks = 32  # root groups a step
    c.rl.attempts = 8  # G, attempts of a root group
    c.rl.states = 32  # failure states a step; 0 is plain GRPO
    c.rl.forks = 8  # K, recoveries of a failure state
    # Tokens sampled in a step, on average, in rounds of so many tasks and states; 0: one round, whatever it takes. For
    # comparisons at equal cost.
    c.rl.step_tokens = 0
    # Where recoveries start: end (of the failed attempt, as in ReTerm-10K; what RL did is unpublished) | error (after
    # the first turn whose error was not repaired) | uniform (after any of its turns)
    c.rl.fork_at = "end"
    # Which failures are forked: balanced (over tasks) | target (tasks whose recovery rate is near `target_rate`: states
    # that are always or never recovered teach nothing) | all (of them, whatever `states` says, unless it is 0)
    c.rl.choose = "balanced"  # unpublished; needs no estimates, of which 12 steps give few
    c.rl.target_rate = 0.5  # where a group's spread is largest
    c.rl.max_depth = 1  # failures before a recovery; 2 also forks failed recoveries, in the step after
    # Versions that a failure may be old when it is forked. 0: failures of the same step only, so that no snapshot
    # outlives its step, and a resumed run goes on as if it had not been stopped.
    c.rl.pool_staleness = 0
    c.rl.pool_size = 256  # failures that wait, at most: a step has as many attempts
    c.rl.recovery_weight = 1.0  # weight of recovery tokens against root tokens (unpublished; equal)
    c.rl.temperature = 0.7  # of sampling, and of the trainer's logprobs; at 1 the tail of so small a model is noise
    # ppo_clip | dppo_tv | gspo | cispo | reinforce | path/to/file.py:function | package.module:function
    c.rl.objective = "ppo_clip"
    c.rl.objective_args = ""  # its other hyper-parameters, as "delta=0.2,..."; empty: the function's own defaults
    # Each attempt counts the same, however long: with "token" the longer attempts, most of which fail, weigh more.
    c.rl.aggregation = "sequence"  # or "token", or "constant" (divided by agent.max_tokens)
    c.rl.clip_low = 0.2
    c.rl.clip_high = 0.28
    c.rl.clip_dual = 0.0  # c of dual-clip PPO, such as 3.0; 0: none, as with GRPO
    c.rl.kl_weight = 0.0  # of the KL to the policy that RL starts from; recent recipes (DAPO, Tmax) have none
    c.rl.kl_estimate = "k3"  # or k1; k3 is GRPO's
    c.rl.entropy_weight = 0.0  # of an entropy bonus; the wider upper clip keeps entropy up
    # Which attempts the two are taken over: all (that were graded; a group that is always solved says most about what
    # the policy forgets, and GRPO has it in too) | trained (those with an advantage; cheaper). They count in the loss's
    # mean. Without a KL and an entropy bonus an attempt without an advantage has no gradient and is left out.
    c.rl.regularise = "all"
    # π/μ between trainer and sampler with the same weights: none | token | sequence, capped or masked at `cap`. The
    # sampler here is the trainer's own code, and without a correction the objective's ratio is against it.
    c.rl.sampler_correction = "none"
    c.rl.correction_mode = "capped"
    c.rl.correction_cap = 2.0
    c.rl.max_mismatch = 0.0  # attempts whose mean |log π − log μ| is above it are dropped; 0: none, and no extra pass
    # mean (of the group) | leave_one_out | length (weighted by length: least variance for long attempts)
    c.rl.baseline = "mean"  # GRPO's
    c.rl.standardise = False  # it weighs groups that are nearly always solved or failed more than balanced ones
    c.rl.failed_credit = 0.0  # share of its recoveries' reward that a failed attempt gets; the method has none
    c.rl.learning_rate = 3e-4
    c.rl.warmup = 0.12  # Adam's first updates are as large as any, whatever the gradient
    c.rl.schedule = "constant"
    c.rl.weight_decay = 0.0
    c.rl.clip_norm = 1.0
    # Few large updates. Single runs with two to four updates on the parts of 128 attempts, most of them stopped after
    # 7 to 20 steps, did not improve at any learning rate tried; such gradients may be too noisy for Adam.
    c.rl.epochs = 4  # passes over a step's attempts
    c.rl.updates = 1  # optimizer updates in a pass
    c.rl.optimizer = "adamw"
    c.rl.micro_rows = 2
    c.rl.row_length = 1024
    c.rl.forked = True  # what the attempts of a group share is computed once
    c.rl.moments_dtype = "float32"
    # Decay of a moving average of the weights, which is then what is evaluated and exported (rollouts are made with the
    # weights themselves); 0: none. With fifty updates it would lag far behind.
    c.rl.ema_decay = 0.0
    c.rl.save_every = 1
    # Steps between validations on train tasks that are kept apart; the best step is the result. 0: the last step is.
    # Off here: with twelve steps there is little to choose from.
    c.rl.validate_every = 0
    c.rl.validation_tasks = 0
    c.rl.validation_attempts = 2

    c.rollout = ml_collections.ConfigDict()
    c.rollout.service = ""  # of a `reterm-rollout`, such as http://127.0.0.1:8765; empty: the trainer samples itself
    # Versions that sampled tokens may be older than the one they train; 0: on-policy. More only with a service.
    c.rollout.max_staleness = 0
    # Groups without spread are made up for by others, this many a step (root groups, and recovery groups) at most.
    c.rollout.refills = 0  # here a step has enough groups, and time is short
    # Attempts that an environment's fault left without a verdict (after one retry) are made up for by others, this many
    # a group at most; 0 leaves the group smaller.
    c.rollout.spares = 0
    # The rest is for a service.
    c.rollout.vllm = ("http://127.0.0.1:8000",)  # the servers that it samples with
    c.rollout.sandbox = ""  # the kind that it runs attempts in, as sandbox.kind; empty: that
    c.rollout.published = ""  # where the trainer leaves weights for the servers; empty: in its workdir
    c.rollout.keep = 3  # of those; a server that is restarted must still find its own
    # What an update does about a server that fails it: exclude (go on without it, if there is another) | stop
    c.rollout.on_failure = "exclude"
    # A command of bash that restarts the server at $RETERM_SERVER once it failed, and ends; empty: it is waited for.
    c.rollout.restart = ""
    c.rollout.probe_tolerance = 0.05  # nats, mean |Δ logprob| of the probe: above bfloat16's noise, below other weights
    c.rollout.patience = 600.0  # seconds that a trainer waits for a service that is away, and a turn for a server

    c.eval = ml_collections.ConfigDict()
    c.eval.attempts = 2  # per held-out task
    c.eval.states = 60  # fixed failure states on held-out tasks
    c.eval.forks = 4  # recoveries per state
    # Recoveries from the state of each failed attempt; Pass@1 is then given with one of them too. 0: none. (The paper
    # trains with two attempts and tests with one.)
    c.eval.own_forks = 1
    c.eval.temperature = 0.7
    c.eval.trees = 6  # fork trees shown in the report
    return c
