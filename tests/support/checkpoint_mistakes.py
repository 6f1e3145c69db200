"""Mistakes in checkpoints, weights, text and Hugging Face models: see ``command_cases``."""

from __future__ import annotations

import json
from pathlib import Path

from command_cases import MODEL, Case, model
from run_mistakes import DATA, RUN, SGD, SMALLER, WAS

LESS = model(("self.head = nn.Linear(width, 4)", "self.head = nn.Linear(width, 4, bias=False)"))
CHECKPOINTS = (
    Case(
        "AP132",
        RUN + " --resume empty",
        r"the folder of (--save) ",
        RUN + " --resume saved",
        files={"empty/x": ""},
    ),
    Case("AP132", RUN + " --resume none", r"the folder of (--save) ", RUN + " --resume saved"),
    Case("AP863", RUN + " --resume saved --weights saved", "remove one", RUN + " --resume saved"),
    Case(
        "AP860", RUN + " --weights none.pt", "there is no file or folder", RUN + " --weights saved"
    ),
    Case(
        "AP860",
        RUN + " --weights empty",
        "a folder of save_pretrained, a checkpoint, or a weight file",
        RUN + " --weights saved",
        files={"empty/x": ""},
    ),
    Case(
        "AP860",
        RUN + " --weights model.py",
        "its ending is none of .safetensors",
        RUN + " --weights saved",
    ),
    Case(
        "AP861",
        RUN + " --weights w.pt",
        "write the file again",
        RUN + " --weights w/model.pt",
        files={"w.pt": "x"},
        before=("export saved --to pt -o w",),
    ),
    Case(
        "AP862",
        "run other.json --steps 1 --weights saved",
        "(--weights-partial)",
        "run other.json --steps 1 --weights saved {0}",
        files={"other.py": LESS},
        before=("plan other.py --cluster cpu:1 --set depth=1 --global-batch 8 -o other.json",),
    ),
    Case(
        "AP862",
        "run other.json --steps 1 --weights saved",
        "use the weights of this model and configuration",
        RUN + " --weights saved",
        files={
            "other.py": MODEL.replace("width=8, depth=8", "width=8, depth=8").replace(
                "nn.Linear(width, 4)", "nn.Linear(width, 5)"
            )
        },
        before=("plan other.py --cluster cpu:1 --set depth=1 --global-batch 8 -o other.json",),
    ),
    Case(
        "AP885",
        "run other.json --steps 1 --resume saved",
        "the model and settings that the checkpoint was saved with",
        RUN + " --resume saved",
        files={"other.py": LESS},
        before=("plan other.py --cluster cpu:1 --set depth=1 --global-batch 8 -o other.json",),
    ),
    Case(
        "AP889",
        RUN + " --resume saved",
        "train with (AdamW)",
        RUN + " --resume saved",
        files={"model.py": MODEL + SGD},
        mended=WAS,
    ),
    Case(
        "AP880",
        RUN + " --resume saved/step-00000002",
        r"(--resume) DIR/(step-)N",
        RUN + " {0} saved/{1}00000001",
        files={"saved/step-00000002/checkpoint.json": "{"},
    ),
    Case(
        "AP880",
        RUN + " --resume saved/step-00000002",
        "",
        RUN + " --resume saved",
        files={"saved/step-00000002/.metadata": "{"},
    ),
    Case(
        "AP881",
        RUN + " --resume saved/step-00000002",
        "copy the files together",
        RUN + " --resume saved/step-00000002",
        files={"elsewhere/__0_0.distcp": Path("saved/step-00000002/__0_0.distcp")},
        mended={"saved/step-00000002/__0_0.distcp": Path("elsewhere/__0_0.distcp")},
    ),
    Case(
        "AP869",
        "export saved -o old",
        "(--force) to replace",
        "export saved -o old {0}",
        files={"old/x": ""},
    ),
    Case(
        "AP870",
        "export saved --dtype f32 -o out",
        r"did you mean (fp\d+)\?",
        "export saved --dtype {0} -o out",
    ),
    Case(
        "AP871",
        "export saved --to hf -o out",
        "(--model) FOLDER, a folder with its config.json; or (--to safetensors)",
        "export saved {1} -o out",
    ),
    Case(
        "AP872",
        "export saved --model other.py -o out",
        "leave (--model) out where the plan is beside",
        "export saved -o out",
        files={"other.py": LESS},
    ),
    Case(
        "AP872",
        "export saved/step-00000002 --model other.py -o out",
        "(--model) TARGET, the model that was trained",
        "export saved/step-00000002 {0} model.py:small -o out",
        files={"other.py": LESS, "model.py": MODEL + SMALLER},
    ),
    Case(
        "AP117",
        "export saved --max-shard-size big -o out",
        "72GiB .* or (80GB)",
        "export saved --max-shard-size {0} -o out",
    ),
)

TEXT = "\n".join(["the cat sat on a mat and saw its dog"] * 40)
LINE = json.dumps({"text": TEXT})
HF = "plan hf:llama --cluster cpu:1 --global-batch 4 --seq 16"
ODD = """{"model_type": "vit", "architectures": ["ViTForMusic"], "hidden_size": 32,
"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32}"""
TRAIN = "run llama.json --steps 1 --data text.txt"
HUGGINGFACE = (
    Case("AP101", "plan llama", r"(hf:llama)", HF),
    Case("AP101", "plan hf:none", r"a folder with a config.json, or a name", HF),
    Case("AP101", "plan hf:empty", r"holds no config.json", HF, files={"empty/x": ""}),
    Case("AP105", HF + " --set num_hiden_layers=1", r"did you mean (\w+)\?", HF + " --set {0}=1"),
    Case(
        "AP109",
        "plan hf:odd --cluster cpu:1",
        "to the list (architectures) of config.json",
        "plan hf:odd --cluster cpu:1 --global-batch 4",
        files={"odd/config.json": ODD},
        mended={"odd/config.json": ODD.replace("ViTForMusic", "ViTForImageClassification")},
    ),
    Case(
        "AP864",
        RUN + " --data text.txt",
        "define build_data",
        RUN,
        files={"text.txt": TEXT},
        mended={"model.py": MODEL + DATA},
    ),
    Case("AP865", TRAIN, "give a text file", TRAIN, mended={"text.txt": TEXT}),
    Case(
        "AP865",
        "run llama.json --steps 1 --data text.jsonl",
        r'write each line as (\{"text": "..."\})',
        "run llama.json --steps 1 --data text.jsonl",
        files={"text.jsonl": '{"words": "a"}'},
        mended={"text.jsonl": LINE},
    ),
    Case(
        "AP865",
        "run llama.json --steps 1 --data text.jsonl",
        "a line is not JSON",
        "run llama.json --steps 1 --data text.jsonl",
        files={"text.jsonl": "{"},
        mended={"text.jsonl": LINE},
    ),
    Case(
        "AP865",
        TRAIN,
        "a shorter (--seq)",
        "run hf:llama --cluster cpu:1 --global-batch 4 {0} 4 --steps 1 --data text.txt",
        files={"text.txt": "the cat sat on a mat"},
    ),
    Case(
        "AP866",
        "run small.json --steps 1 --data text.txt",
        "copy the model's own tokenizer",
        TRAIN,
        before=(HF + " --set vocab_size=20 -o small.json",),
        files={"text.txt": TEXT},
    ),
    Case(
        "AP867", HF + " --lora r=8,alhpa=16", r"did you mean (alpha)\?", HF + " --lora r=8,{0}=16"
    ),
    Case("AP867", HF + " --lora r=0,alpha=16", r"r=(8),alpha=(16)", HF + " --lora r={0},alpha={1}"),
    Case(
        "AP867",
        HF + " --lora r=8,alpha=16,targets=q_porj",
        r"did you mean (\w+)\?",
        HF + " --lora r=8,alpha=16,targets={0}",
    ),
    Case(
        "AP868",
        HF + " --lora r=8,base=nf4",
        r"leave base=nf4 out of (--lora)",
        HF + " {0} r=8",
    ),
    Case("AP871", "export tuned --to peft -o out", r"(--to hf)", "export tuned {0} -o out"),
    Case(
        "AP871",
        "export adapted --to peft --model llama -o out",
        r"(--lora) r=R,alpha=ALPHA",
        "export adapted --to peft --model llama {0} r=8,alpha=16 -o out",
    ),
)

CASES = (*CHECKPOINTS, *HUGGINGFACE)
