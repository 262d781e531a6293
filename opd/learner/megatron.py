"""One rank of the learner: a Megatron-core model, its gradients and its optimizer.

    forward_backward ── schedule: forward → fused head and loss → backward, per microbatch ──► sum over ranks
    optim_step       ── clip ──► Adam on fp32 master weights ──► weights ──► gradients cleared

The loss of every microbatch is already divided by the trained tokens of the whole step, so gradients are summed, never
averaged: over microbatches by accumulation, over ranks by all-reduce.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray.util
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not in __all__
from transformers import AutoConfig

from opd.config import GkdObjective, LearnerConfig
from opd.device import HostProfile
from opd.errors import StepAborted
from opd.learner import cpu_patches
from opd.learner.fused_loss import LossTargets, fused_head_loss, head_metrics, logits_fp32
from opd.learner.group import ABORTS
from opd.learner.hf_weights import export_hf, load_hf
from opd.learner.model import TORCH_DTYPES, build_model
from opd.learner.objectives import TOKEN_METRICS
from opd.matmul import set_fp32_precision
from opd.protocols import WeightPublisher
from opd.types import LossStats, Microbatch, OptimStats


class LearnerRank:
    """One process of the Megatron group. Calls must reach all ranks, in the same order."""

    def __init__(
        self,
        model_folder: Path,
        learner: LearnerConfig,
        objective: GkdObjective,
        total_steps: int,
        vocab_size: int,
        rank: int,
        profile: HostProfile,
        threads: int,
    ) -> None:
        self.learner, self.objective = learner, objective
        self.rank = rank
        self._profile = profile
        self._total_steps = total_steps
        self._vocab_size = vocab_size  # ids that count; embedding rows beyond are padding and get no probability
        self._folder = model_folder
        self._on_cpu = not profile.has_gpus
        self._device = torch.device(profile.torch_device)
        self._has_gradient = False
        self._aborts_seen = 0
        self._publisher: WeightPublisher | None = None
        if self._on_cpu:
            cpu_patches.apply()
            torch.set_num_threads(threads)
            if learner.dtype == "bf16":
                set_fp32_precision("bf16")  # attention scores and logits are fp32 products of bf16 numbers
        else:
            torch.cuda.set_device(0)  # Ray shows each rank its own GPU only

    def open_store(self, host: str | None = None, port: int = 0) -> tuple[str, int]:
        """Rank 0: open the rendezvous store; unless given, on a port that the system chooses. Give host and port."""
        host = host or ray.util.get_node_ip_address()
        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(self, host: str, port: int) -> dict[str, float]:
        """Join the group, build the model, load the weights; give the sizes for the header."""
        if self.rank:
            self._store = TCPStore(host, port, is_master=False)
        world = self.learner.data_parallel
        dist.init_process_group(self._profile.backend, store=self._store, rank=self.rank, world_size=world)
        with self._megatron():
            parallel_state.initialize_model_parallel()
            self._build()
        return {"parameters": float(sum(p.numel() for p in self.model.parameters())), "pid": float(os.getpid())}

    def _megatron(self) -> AbstractContextManager[None]:
        """Surround Megatron's own code on this host."""
        return cpu_patches.cuda_means_cpu() if self._on_cpu else nullcontext()

    def _build(self) -> None:
        learner = self.learner
        dtype = TORCH_DTYPES[learner.dtype]
        self.hf_config = AutoConfig.from_pretrained(self._folder)
        self.model = build_model(self.hf_config, learner, on_cpu=self._on_cpu).to(device=self._device, dtype=dtype)
        load_hf(self.model, self.hf_config, self._folder)
        self._ddp = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                check_for_nan_in_grad=True,
                use_distributed_optimizer=learner.distributed_optimizer,
            ),
            self.model,
        )
        self._ddp.broadcast_params()
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=learner.lr,
                min_lr=learner.min_lr,
                weight_decay=learner.weight_decay,
                adam_beta1=learner.adam_beta1,
                adam_beta2=learner.adam_beta2,
                adam_eps=learner.adam_eps,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=learner.distributed_optimizer,
                clip_grad=learner.clip_grad_norm or math.inf,  # with 0 Megatron would not measure the norm
            ),
            [self._ddp],
        )
        # Megatron sets lr before the step it is for is counted; see optim_step
        self._schedule = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=learner.lr,
            min_lr=learner.min_lr,
            lr_warmup_steps=learner.warmup_steps,
            lr_decay_steps=self._total_steps + 1,
            lr_decay_style=learner.schedule,
            start_wd=learner.weight_decay,
            end_wd=learner.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self._ddp.zero_grad_buffer()

    def forward_backward(self, microbatches: Sequence[Microbatch], trained_tokens: int) -> LossStats:
        """Add the gradient of Σ token losses / `trained_tokens` over this rank's microbatches, then sum over ranks."""
        self.model.train()
        try:
            stats = self._run(microbatches, self._loss(1.0 / max(trained_tokens, 1)), forward_only=False)
        except StepAborted:
            with self._megatron():
                finalize_model_grads([self._ddp])  # the others may be waiting for this rank in here
            self._clear_gradients()
            raise
        with self._megatron():
            finalize_model_grads([self._ddp])
        self._has_gradient = trained_tokens > 0
        return stats

    def evaluate(self, microbatches: Sequence[Microbatch]) -> LossStats:
        """Measure without a gradient."""
        self.model.eval()

        def metrics(hidden: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
            sums = head_metrics(
                hidden,
                self.model.head_weight[: self._vocab_size],
                self._targets(batch),
                self.objective,
                chunk_tokens=self.learner.loss_chunk_tokens,
            )
            return sums[0], sums

        return self._run(microbatches, metrics, forward_only=True)

    def topk_logprobs(self, batch: Microbatch, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give the student's own scores of a microbatch: token log-probs [N], top-K ids [N, K] and log-probs [N, K]."""
        self.model.eval()
        kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

        def keep(hidden: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
            logprobs = logits_fp32(hidden, self.model.head_weight[: self._vocab_size]).log_softmax(-1)
            top = logprobs.topk(k)
            token = logprobs.gather(1, self._tensor(batch.target_ids)[:, None])[:, 0]
            kept.append((token.cpu().numpy(), top.indices.cpu().numpy(), top.values.cpu().numpy()))
            return token.sum(), token.new_zeros(len(TOKEN_METRICS))

        self._run([batch], keep, forward_only=True)
        return kept[0]

    def optim_step(self) -> OptimStats:
        """Clip, step, clear the gradients; with nothing trained since the last step the weights stay as they are."""
        self._schedule.step(increment=1)  # so that the first step of a warm-up has lr/warmup_steps, not 0
        lr = float(self._optimizer.param_groups[0]["lr"])
        if not self._has_gradient:
            return OptimStats(grad_norm=0.0, lr=lr, skipped=True, memory_gib=self.memory_gib())
        with self._megatron():
            outcome: Any = self._optimizer.step()
        successful, grad_norm, _ = outcome
        self._clear_gradients()
        return OptimStats(grad_norm=float(grad_norm), lr=lr, skipped=not successful, memory_gib=self.memory_gib())

    def export(self, folder: Path) -> None:
        """Rank 0: write config.json and safetensors that `transformers` and vLLM load; other ranks do nothing."""
        if self.rank:
            return
        dtype = TORCH_DTYPES[self.learner.dtype]
        # Copies: gate and up are views of one matrix.
        state = {name: tensor.to("cpu", copy=True) for name, tensor in self._hf_weights()}
        save_torch_state_dict(state, str(folder), metadata={"format": "pt"})
        for file in folder.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors makes them private
        config = self.hf_config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def weight_shapes(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Give Hugging Face name, dtype and shape of every tensor, in the order in which they are published."""
        return [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self._hf_weights()]

    def open_publisher(self, publisher: WeightPublisher, info: Any, plan: Any) -> None:
        """Rank 0: get ready to send weights, instead of what there was before; other ranks do nothing."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = publisher if self.rank == 0 else None
        if self._publisher is not None:
            self._publisher.open(info, plan)

    def publish(self) -> None:
        """Rank 0: send the weights as they are now; other ranks do nothing."""
        if self._publisher is not None:
            with torch.no_grad():
                self._publisher.send(self._hf_weights())

    def _hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Give the weights in the compute type under Hugging Face names, one parameter at a time."""
        return export_hf(dict(self.model.named_parameters()), self.hf_config, TORCH_DTYPES[self.learner.dtype])

    def _clear_gradients(self) -> None:
        self._ddp.zero_grad_buffer()
        # In fp32 the optimizer leaves param.grad pointing at main_grad, to which the next backward pass would add it.
        self._optimizer.zero_grad()
        self._has_gradient = False

    def _raise_if_aborted(self) -> None:
        """Look whether the driver has asked, since the last look, to abort what is running; see `ABORTS`."""
        aborts = self._store.add(ABORTS, 0)
        if aborts > self._aborts_seen:
            self._aborts_seen = aborts
            raise StepAborted

    def memory_gib(self) -> float:
        """Give the peak memory of this rank."""
        return self._profile.peak_memory_gib()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.tensor(array, device=self._device)

    def _targets(self, batch: Microbatch) -> LossTargets:
        return LossTargets(
            ids=self._tensor(np.concatenate([batch.topk_ids, batch.target_ids[:, None]], axis=1)),
            teacher_topk=self._tensor(batch.topk_logprobs),
            from_dataset=self._tensor(batch.from_dataset),
            sampling=self._tensor(batch.sampling_logprobs),
        )

    def _loss(self, scale: float) -> Callable[[Tensor, Microbatch], tuple[Tensor, Tensor]]:
        def loss(hidden: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
            weight: Any = self.model.head_weight
            return fused_head_loss(
                hidden,
                weight.detach()[: self._vocab_size],
                self._targets(batch),
                self.objective,
                scale=scale,
                chunk_tokens=self.learner.loss_chunk_tokens,
                main_grad=weight.main_grad[: self._vocab_size],
            )

        return loss

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        head: Callable[[Tensor, Microbatch], tuple[Tensor, Tensor]],
        *,
        forward_only: bool,
    ) -> LossStats:
        """Send the microbatches through Megatron's schedule; `head` gets the [N, H] hidden states of trained tokens."""
        if not microbatches:
            return LossStats(sums=dict.fromkeys(TOKEN_METRICS, 0.0), tokens=0)

        def forward_step(batches: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            self._raise_if_aborted()
            batch: Microbatch = next(batches)
            positions = self._tensor(batch.position_ids)
            packed = self.model.packed_samples(positions, self._tensor(batch.cu_seqlens))
            hidden = model(self._tensor(batch.input_ids)[None], positions[None], None, packed_seq_params=packed)

            def loss_func(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                rows = output[:, 0].index_select(0, self._tensor(batch.predict_positions))
                loss, sums = head(rows, batch)
                return loss, torch.tensor(batch.num_trained_tokens, dtype=torch.int), sums

            return hidden, loss_func

        with self._megatron(), torch.set_grad_enabled(not forward_only):
            sums = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(microbatches),
                model=[self._ddp],
                num_microbatches=len(microbatches),
                seq_length=max(len(b.input_ids) for b in microbatches),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        totals = torch.stack(sums).sum(0).tolist()
        tokens = sum(b.num_trained_tokens for b in microbatches)
        return LossStats(sums=dict(zip(TOKEN_METRICS, totals, strict=True)), tokens=tokens)
