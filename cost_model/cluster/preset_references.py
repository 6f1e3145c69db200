"""Where the figures of presets were read: addresses, each with the date of reading.

A vendor's page is often known here by a table of others that cites it; then the table is named, as
it is what was read. A figure without such a place says ``NOT_CHECKED``, and a test lists these.
"""

from __future__ import annotations

READ = "2026-11-27"
NOT_CHECKED = "not checked"


def read(address: str, date: str = READ) -> str:
    """An address with the date on which it was read.

    >>> read("example.org/a100", "2026-01-31")
    'example.org/a100 (read 2026-01-31)'
    """
    return f"{address} (read {date})"


SPEED_MONITOR = read(
    "mosaicml/composer@003ec03 composer/callbacks/speed_monitor.py, citing NVIDIA's data sheets"
)
LIGHTNING = read(
    "Lightning-AI/pytorch-lightning@0810121 src/lightning/fabric/utilities/throughput.py, citing "
    "NVIDIA's data sheets"
)
TORCHTITAN = read("pytorch/torchtitan@b5bcd76 torchtitan/tools/utils.py")
TORCHAO = read("pytorch/ao@36027d8 torchao/testing/training/roofline_utils.py")
NANOCHAT = read("karpathy/nanochat@92d63d4 nanochat/common.py")
LLM_ANALYSIS = read("cli99/llm-analysis@d841e40 llm_analysis/gpu_configs")
GPUMAP = read("lamonoai/gpumap@8d5e174 nvidia/GPU.md")
GPU_SPECS = read("winston-zhang-orz/gpu-specs@097f0fb specs.md")
H100_TABLE = read("archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html")
NVIDIA_TABLES = read(
    "NVIDIA's tables of H200, HGX B200 and GB200 NVL72 in zdszero/zdszero.github.io@a532b22 "
    "sources/Computer/Artificial_Intelligence/Hardware.md"
)
ML_ENGINEERING = read("stas00/ml-engineering@744d01e compute/accelerator/README.md")
AZURE = read("Azure/AI-benchmarking-guide@8fd0c6e")
WAREDB = read("waredb.com/processor/nvidia-geforce-rtx-4090")
ROCM_SPECS = read("ROCm/ROCm@e396b48 docs/reference/gpu-arch-specs.rst")
ROCM_MI300 = read("ROCm/ROCm@e396b48 docs/conceptual/gpu-arch/mi300.md")
ROCM_MI250 = read("ROCm/ROCm@e396b48 docs/conceptual/gpu-arch/mi250.md")
H20_TABLE = read("zangshuxian.com/new/674733024499207168")
H800_TABLE = read("www.tumgag.com/tag/nvidia%20h100, H800 against H100")
FLASH_ATTENTION = read("Dao-AILab/flash-attention@0251105 assets, plots of forward with backward")
NVIDIA_SMI = read("nvidia-smi's output in files on GitHub that have this number of MiB")
DEVICE_PROPERTIES = read("torch.cuda.get_device_properties in files on GitHub")
DGX_1_MEMORY = read("forums.developer.nvidia.com/t/148508: 512 GB DDR4-2133")
DGX_A100_MEMORY = read("www.hardwaretimes.com, NVIDIA DGX A100: two EPYC 7742, 1 TB")
ROME_CHANNELS = read("www.tomshardware.com, Genoa's memory channels: 8 of DDR4-3200 before")
DGX_H100_MEMORY = read(
    "mlcommons/inference_results_v4.1 closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json: two "
    "Xeon 8480C, 32 modules of 64 GB"
)
TWO_MODULES = read(
    "Dell's manual of the PowerEdge XE9680, p. 142: two modules per channel run at 4400 MT/s"
)
