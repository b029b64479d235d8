"""The loop: steps, evaluations, checkpoints, and what the user sees of them."""

from __future__ import annotations

import dataclasses
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax

from transformer_jax.averaging import average_params
from transformer_jax.batching import (
    Batch,
    Bucket,
    Layout,
    Position,
    TokenPairs,
    TrainingBatches,
    every_pair_once,
    make_buckets,
    read_ahead,
)
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.cleaning import describe_report
from transformer_jax.config import DataConfig, RunConfig, to_json
from transformer_jax.errors import UserError
from transformer_jax.evaluation import loss_of, per_token, score_translations
from transformer_jax.files import writing
from transformer_jax.model import Transformer
from transformer_jax.model_folder import save_model
from transformer_jax.optimizer import adam
from transformer_jax.packing import make_layout
from transformer_jax.plots import is_number
from transformer_jax.progress import Progress
from transformer_jax.reranking import own_backward
from transformer_jax.rewritten_text import RewrittenText
from transformer_jax.run_data import Texts, find_tokenizer, read_texts, to_tokens, training_pairs
from transformer_jax.run_folder import METRIC_NAMES, RunFolder
from transformer_jax.run_model import (
    check_backward,
    check_devices,
    check_lengths,
    fit_model,
    load_initial,
    model_line,
    within_the_model,
)
from transformer_jax.samples_page import samples_of
from transformer_jax.sharding import data_mesh, is_main_process, replicate, shard_rows, wait_for_main
from transformer_jax.signals import catch_signals
from transformer_jax.tokenizer import Tokenizer, load_tokenizer
from transformer_jax.training import StepLog, TrainState, init_params, make_loss_step, make_train_step, start_from
from transformer_jax.translator import Translator

Resume = Literal["auto", "never"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    score: float | None
    """The best score on the validation text."""
    stopped_by: str | None = None
    """The signal that ended the run early."""
    caught: str | None = None
    """The signal that came, be it too late to end the run early."""

    @property
    def exit_code(self) -> int:
        """0, or what a shell expects of a program that ended by a signal: 128 plus its number."""
        return 0 if self.stopped_by is None else 128 + signal.Signals[self.stopped_by]


@dataclasses.dataclass
class Best:
    """The best evaluation so far, kept with each checkpoint."""

    score: float | None = None
    step: int = 0
    evaluations_since: int = 0


class Trainer:
    """One run: built from a config, then trained. Everything that takes long happens in `train`."""

    def __init__(self, config: RunConfig, folder: Path, resume: Resume = "auto") -> None:
        self.say = Progress.say if is_main_process() else lambda *_: None
        self.folder = RunFolder(folder)
        found = self.folder.has_checkpoints
        if found and resume == "never":
            raise self.folder.already_begun()
        self.mesh = data_mesh(config.train.n_devices)
        check_devices(config, self.mesh.size)
        check_backward(config)
        self.initial = load_initial(config)
        if self.initial is not None:
            config = within_the_model(config, self.initial.config)
        check_lengths(config.data, config.model if self.initial is None else self.initial.config)
        texts = read_texts(config.data, rewritten=RewrittenText.of(config, self.folder.rewritten))
        self.folder.create()
        tokenizer = self._tokenizer(config.data, texts, resuming=found)
        model_config = fit_model(config.model, tokenizer) if self.initial is None else self.initial.config
        self.suppressed = () if self.initial is None else self.initial.suppressed
        self.search = {} if self.initial is None else self.initial.search
        self.config = dataclasses.replace(config, model=model_config)
        self.texts, self.tokenizer = texts, tokenizer
        self.backward = own_backward(config.data.source_lang, tokenizer) if config.decode.rerank_weight else None
        self.samples = config.samples or texts.samples

        pairs, self.data_report = training_pairs(config.data, texts, tokenizer, model_config.start_id, self.folder)
        self.batches, self.config = plan_steps(pairs, make_layout(pairs, config.data), self.config)
        self.validation = self._validation_batches()

        self.model = Transformer(model_config)
        train = self.config.train
        self.optimizer = adam(train, model_config.d_model)
        self.train_step = make_train_step(self.model, self.optimizer, train, self.mesh)
        self.loss_step = make_loss_step(self.model, train, self.mesh)
        self._translator: Translator | None = None
        self._reader: Iterator[Batch] | None = None
        self.checkpoints = Checkpoints(
            self.folder.checkpoints, config.train.keep_checkpoints, config.train.checkpoint_every
        )
        self._describe()

    def _tokenizer(self, config: DataConfig, texts: Texts, resuming: bool) -> Tokenizer:
        """The tokenizer that a run is resumed with, or a new one. The main process makes it, the others read it."""
        if resuming:
            self._check_same_tokenizer(config)
        elif is_main_process():
            if self.initial is not None:
                tokenizer = self.initial.tokenizer
            else:
                tokenizer = find_tokenizer(config, texts, progress=sys.stderr.isatty())
            part = self.folder.tokenizer.with_name(".tokenizer.part")
            for folder in (part, self.folder.tokenizer):  # of a start that got no further
                shutil.rmtree(folder, ignore_errors=True)
            with writing(self.folder.tokenizer):
                tokenizer.save(part)
                part.rename(self.folder.tokenizer)
        wait_for_main(self.folder.tokenizer.is_dir, "tokenizer")
        return load_tokenizer(self.folder.tokenizer)

    def _check_same_tokenizer(self, config: DataConfig) -> None:
        unknown = "Whether the run was started with the same options of its vocabulary is not checked."
        before, now = self.folder.read_config(unknown).get("data"), to_json(config)
        if not isinstance(before, dict):
            return  # a file that was damaged or that another program wrote
        for name in ("tokenizer", "tokenizer_type", "vocab_size", "task"):
            if name in before and before[name] != now[name]:
                raise UserError(
                    f"The run was started with data.{name} {before[name]}, now it is {now[name]}; a run keeps its "
                    "vocabulary: go on with the same options, or train into another folder."
                )

    def _validation_batches(self) -> tuple[TokenPairs, list[Bucket]] | None:
        """The validation pairs with shapes of their own: none is left out, however long."""
        if self.texts.validation is None:
            return None
        limit = self.config.model.max_length
        pairs, changed = to_tokens(self.texts.validation, self.tokenizer, limit, "cut", self.config.model.start_id)
        for rule, n in changed.items():
            self.say(f"validation {n:,} pairs {rule}")
        data = dataclasses.replace(self.config.data, n_buckets=min(4, self.config.data.n_buckets))
        return pairs, make_buckets(pairs, data)

    def _describe(self) -> None:
        c, b = self.config, self.batches
        self.say(f"run        {self.folder.folder}")
        if self.initial is not None:
            self.say(f"start from {self.initial.source}")
        self.say(model_line(c.model))
        for line in describe_report(self.data_report):
            self.say(line)
        shapes = ", ".join(map(str, b.layout.shapes))
        self.say(
            f"batches    {b.batches_per_epoch:,} an epoch, {c.data.batching}, padding {b.padding_share:.1%}, "
            f"shapes {shapes}"
        )
        self.say(f"devices    {self.mesh.size} {jax.devices()[0].device_kind}")

    def train(self) -> Outcome:
        """Trains to the last step, or until a signal, early stopping or a loss that is not a number."""
        c = self.config.train
        params = init_params(self.model, c.seed) if self.initial is None else self.initial.params
        state = replicate(start_from(params, self.optimizer, c.ema_decay), self.mesh)
        best, step = Best(), 0
        if self.checkpoints.latest_step is not None:
            state, saved = self.checkpoints.restore(state)
            step = self.batches.check_position(saved["position"])
            best = self._best_so_far(step, Best(**saved["best"]))
            self.say(f"resuming   at step {step:,}")
        self.folder.write_config(self.config)
        self.folder.write_data_report(self.data_report)
        self.folder.forget_after(step)

        with catch_signals() as caught, Progress(c.steps, step) as progress:
            if self.initial is not None and step == 0 and c.evaluate_every is not None:
                self._evaluate_before(state.used_params, best, progress)
            while step < c.steps and not caught and not self._patience_is_over(best):
                stop_at = min(self._next_stop(step), c.steps)
                state, step = self._run_steps(state, step, stop_at, caught, progress)
                if self._is_evaluated(step):
                    self._evaluate(step, state.used_params, best, progress)
                over = step == c.steps or caught or self._patience_is_over(best)
                if step % c.checkpoint_every == 0 or over:
                    self._save(state, self.batches.position(step), best)
                if over and not self._is_evaluated(step):
                    self.folder.draw()  # curves of what was learned since, or in a run without evaluations
            stopped_by = caught[0] if caught and step < c.steps else None
            averaged = [r for r in self.folder.records("average") if r["step"] == step]
            if c.average_last > 1 and not stopped_by and not averaged:
                self._evaluate_average(step, best, progress)
        self.checkpoints.close()
        if stopped_by:
            self.say(f"{stopped_by}: saved at step {step:,}; the same command goes on from there.")
        else:
            self._finish(step, state.used_params, best)
        self.folder.close()
        return Outcome(step, best.score, stopped_by, caught[0] if caught else None)

    def _best_so_far(self, step: int, best: Best) -> Best:
        """The best evaluation up to a checkpoint; that of the average came after it was saved."""
        for record in self.folder.records("average"):
            score: Any = record.get("score")
            if record["step"] == step and is_number(score) and (best.score is None or score > best.score):
                best = Best(score, step)
        return best

    def _patience_is_over(self, best: Best) -> bool:
        patience = self.config.train.patience
        return patience is not None and best.evaluations_since >= patience

    def _next_stop(self, step: int) -> int:
        """The next step after which something other than a step is to be done."""
        intervals = [self.config.train.checkpoint_every, self.config.train.evaluate_every]
        return min(step - step % n + n for n in intervals if n)

    def _is_evaluated(self, step: int) -> bool:
        every = self.config.train.evaluate_every
        return every is not None and (step % every == 0 or step == self.config.train.steps)

    def _run_steps(
        self, state: TrainState, step: int, stop_at: int, caught: list[str], progress: Progress
    ) -> tuple[TrainState, int]:
        """Steps up to `stop_at`, or to the first after a signal; all of them are logged when it returns."""
        pending: tuple[int, StepLog, float] | None = None
        self._reader = self._reader or read_ahead(self.batches, step)
        while step < stop_at and not caught:
            began = time.monotonic()
            batch = next(self._reader)
            waited = time.monotonic() - began
            state, log = self.train_step(state, shard_rows(batch, self.mesh))
            step += 1
            # The log of the step before: while it is read, the device is busy with this one.
            if pending is not None:
                self._log(*pending, progress)
            pending = (step, log, waited)
        if pending is not None:
            self._log(*pending, progress)
        return state, step

    def _log(self, step: int, log: StepLog, waited: float, progress: Progress) -> None:
        log = jax.device_get(log)
        values = per_token(log.sums)
        if not (math.isfinite(values["loss"]) and math.isfinite(log.gradient_norm)):
            saved = self.checkpoints.latest_step
            raise UserError(
                f"The loss of step {step} is {values['loss']}, the norm of its gradient {log.gradient_norm}; "
                + (f"the last good checkpoint is that of step {saved}. " if saved is not None else "")
                + "Lower the learning rate or set train.clip_norm, and start again."
            )
        rate = float(log.rate)
        speed, wait = progress.step(step, float(log.sums.tokens), values["loss"], rate, waited)
        if step % self.config.train.log_every == 0 or step == self.config.train.steps:
            self.folder.write(
                "train",
                step,
                **values,
                epoch=step * self.config.data.readings / self.batches.batches_per_epoch,
                rate=rate,
                gradient_norm=float(log.gradient_norm),
                target_tokens_per_second=speed,
                wait=wait,
                padding=self.batches.padding_share,
            )

    def _evaluate_average(self, step: int, best: Best, progress: Progress) -> None:
        """Evaluates the average of the last checkpoints: the run's model, unless an earlier one scored higher."""
        self.checkpoints.wait()
        train = self.config.train
        regular = [s for s in self.checkpoints.steps if s % train.checkpoint_every == 0 or s == step]
        params, steps = average_params(self.folder.checkpoints, regular[-train.average_last :], leave_out_damaged=True)
        params = replicate(params, self.mesh)
        self.say(f"average    of {len(steps)} checkpoints, steps {', '.join(map(str, steps))}")
        if self.config.train.evaluate_every is None:
            self._save_model(params)
            self.folder.write("average", step, steps=steps)
        else:
            self._evaluate(step, params, best, progress, averaged=steps)

    def _evaluate(
        self, step: int, params: Any, best: Best, progress: Progress, averaged: list[int] | None = None
    ) -> None:
        """Loss and score on the validation text; the model folder is written when the score is the best. `averaged`:
        the steps whose checkpoints these parameters are the average of."""
        translator = self._translate_with(params)
        began = time.monotonic()
        record: dict[str, Any] = {} if averaged is None else {"steps": averaged}
        score = None
        if self.validation is not None and self.texts.validation is not None:
            pairs, buckets = self.validation
            sums = loss_of(self.loss_step, translator.params, every_pair_once(pairs, buckets), self.mesh)
            record |= per_token(sums)
            limit = self.config.decode.limit
            found = self._score(translator, self.texts.validation.source[:limit], self.texts.validation.target[:limit])
            record |= found
            score = record["score"] = found[self.config.decode.metric]
        if self.samples:
            shown = translator.translate(self.samples)
            record["samples"] = [[s, t.text] for s, t in zip(self.samples, shown, strict=True)]
        improved = score is None or best.score is None or score > best.score
        if improved:
            best.score, best.step, best.evaluations_since = score, step, 0
            self._save_model(translator.params)
        else:
            best.evaluations_since += 1
        record["seconds"] = time.monotonic() - began
        self.folder.write("validation" if averaged is None else "average", step, **record)
        self.folder.draw()
        progress.pause(time.monotonic() - began)
        if score is not None:
            self.say(
                f"step {step:>7,}  validation loss {record['loss']:.4f}  accuracy {record['accuracy']:.4f}  "
                f"{METRIC_NAMES[self.config.decode.metric]} {score:.4g}{'  best' if improved else ''}"
            )

    def _evaluate_before(self, params: Any, best: Best, progress: Progress) -> None:
        """Scores the model that the run starts from, by the code that scores it afterwards."""
        self._evaluate(0, params, best, progress)
        if self.texts.test is not None and not self.config.train.skip_test:
            translator = self._translate_with(params)
            self.folder.write("before", 0, **self._score(translator, self.texts.test.source, self.texts.test.target))

    def _translate_with(self, params: Any) -> Translator:
        """A translator of these parameters; its programs are compiled once in a run."""
        if self._translator is None:
            search, back = self.config.decode, self.backward
            self._translator = Translator(
                self.model, params, self.tokenizer, search, self.mesh, self.suppressed, backward=back
            )
        return self._translator.with_params(params)

    def _finish(self, step: int, params: Any, best: Best) -> None:
        """The run is over: its model folder is complete; the test text is scored with the best model, once."""
        train = self.config.train
        if train.evaluate_every is None and train.average_last == 1:
            self._save_model(params)
        results = [r for r in self.folder.records("result") if r["step"] == step]
        if not results:
            result = {"best_step": best.step, "best_score": best.score}
            if self.texts.test is not None and not train.skip_test and train.evaluate_every is not None:
                translator = Translator.from_pretrained(self.folder.folder, self.config.decode, backward=self.backward)
                result |= self._score(translator, self.texts.test.source, self.texts.test.target)
            self.folder.write("result", step, **result)
            results = [result]
        self._tell_results(step, results[0])

    def _tell_results(self, step: int, result: dict[str, Any]) -> None:
        evaluations = self.folder.records("validation")
        samples = samples_of(evaluations[-1]) if evaluations else []
        width = max((len(source) for source, _ in samples), default=0)
        for source, translation in samples:
            self.say(f"  {source:<{width}}  ->  {translation}")
        self.say(f"finished   {step:,} steps")
        if result["best_score"] is not None:
            name = METRIC_NAMES[self.config.decode.metric]
            self.say(f"validation {name} {result['best_score']:.4g}, best at step {result['best_step']:,}")
        tested = [("test before", r) for r in self.folder.records("before")] + [("test       ", result)]
        for name, scores in tested:
            if "bleu" in scores:
                self.say(
                    f"{name:<10} BLEU {scores['bleu']:.2f} (lower-cased {scores['bleu_lowercase']:.2f}), chrF "
                    f"{scores['chrf']:.2f}, exact match {scores['exact']:.4g}  [{scores['signature']}]"
                )
        counts = ", ".join(f"{name} {n}" for name, n in self.program_counts().items())
        self.say(f"programs   compiled: {counts}")
        self.say(f"model      {self.folder.model}")

    def _score(self, translator: Translator, sources: list[str], references: list[str]) -> dict[str, Any]:
        outputs = [t.text for t in translator.translate(sources)]
        return dataclasses.asdict(score_translations(outputs, references, self.config.data.target_lang))

    def _save_model(self, params: Any) -> None:
        if is_main_process():
            save_model(self.folder.model, self.config.model, jax.device_get(params), self.suppressed, self.search)
            self.tokenizer.save(self.folder.model)

    def _save(self, state: TrainState, position: Position, best: Best) -> None:
        self.checkpoints.save(state, {"position": position.to_json(), "best": dataclasses.asdict(best)})

    def program_counts(self) -> dict[str, int]:
        """How many programs each jitted function has been compiled to."""
        functions: dict[str, Any] = {"training": self.train_step, "validation loss": self.loss_step}
        counts = {name: function._cache_size() for name, function in functions.items()}
        return counts if self._translator is None else counts | {"translation": self._translator.n_programs()}


def plan_steps(pairs: TokenPairs, layout: Layout, config: RunConfig) -> tuple[TrainingBatches, RunConfig]:
    """The run's batches, and the config with counts of epochs turned into counts of steps."""
    train = config.train
    batches = TrainingBatches(pairs, layout, train.seed, train.steps)
    # A text that was read several times, each with other sub-words, is passed as often in one epoch of the batches.
    per_pass = batches.batches_per_epoch / config.data.readings
    if train.epochs is not None:
        train = dataclasses.replace(train, steps=math.ceil(train.epochs * per_pass))
        batches = dataclasses.replace(batches, n_batches=train.steps)
    if train.evaluate_every == 0:
        train = dataclasses.replace(train, evaluate_every=math.ceil(per_pass))
    return batches, dataclasses.replace(config, train=train)
