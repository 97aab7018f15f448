"""The weights that a run begins with: drawn from its seed, or those of ``training.init_from``."""

from pathlib import Path

from llama_core.config.run import RunConfig
from llama_core.errors import TrainingInfraError
from llama_core.hugging_face.pretrained import checkpoints_behind, where_stored
from llama_core.models.llama import Llama
from llama_core.parallel.ranks import wait_for_all
from llama_core.records.checkpoints import checkpoint_name
from llama_core.records.directory import RunDirectory
from llama_core.training.checkpoint import refuse_damaged_together
from llama_core.training.engine import Engine
from llama_core.training.stored_weights import Pretrained


class InitialWeights:
    """Sets the initial weights, and knows where each comes from.

    Args:
        run: the run.
        config: its configuration.
    """

    def __init__(self, run: RunDirectory, config: RunConfig) -> None:
        self._run = run
        self._config = config

    def set(self, engine: Engine) -> None:
        """Draw or read the weights; all ranks call it together.

        Raises:
            WeightsError: if they cannot be read.
        """
        training = self._config.training
        if training.init_from is None:
            engine.initialize_weights(training.seed)
            return
        source = Path(training.init_from)
        for checkpoint in checkpoints_behind(source):
            refuse_damaged_together(checkpoint)
        pretrained = Pretrained(self._config.spec, source, seed=training.seed)
        engine.set_weights(pretrained.fill)
        pretrained.done()
        wait_for_all()  # a training collective would time out while a rank with a slow disk still reads

    def where_read(self, name: str, model: Llama, resumed_at: int) -> str:
        """Return where this process has read a weight from, or its name if it was drawn.

        Args:
            name: the weight's name.
            model: this rank's part of the model, which has the weight.
            resumed_at: the step of the checkpoint that the process began with; 0 if it began with none.
        """
        is_trained = model.get_parameter(name).requires_grad
        if resumed_at and is_trained:
            return f"{name} of {self._run.checkpoints / checkpoint_name(resumed_at)}"
        source = self._config.training.init_from
        if source is None:
            return name
        try:
            return where_stored(name, self._config.spec, Path(source))
        except TrainingInfraError:  # the files have changed meanwhile, and the other ranks wait for an answer
            return f"{name} of {source}"
