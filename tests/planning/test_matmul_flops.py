from dataclasses import replace

from llama_core.config.models import model_spec
from llama_core.config.strategy import MATRICES, LoRA, MoE
from llama_core.planning.time.matmul_flops import matmul_flops_per_token, num_matmul_parameters


def test_a_token_costs_six_flops_per_active_matrix_parameter_and_four_if_it_is_frozen():
    dense = model_spec("llama3_8b")
    sparse, adapted = replace(dense, moe=MoE()), replace(dense, lora=LoRA(target_modules=MATRICES))
    norms = (2 * dense.num_layers + 1) * dense.hidden_size
    assert matmul_flops_per_token(dense) == 6 * num_matmul_parameters(dense)
    assert matmul_flops_per_token(sparse) == 6 * (sparse.num_active_parameters - dense.embedding_parameters - norms)
    trained = 6 * adapted.num_trainable_parameters
    assert matmul_flops_per_token(adapted) == 4 * num_matmul_parameters(dense) + trained
