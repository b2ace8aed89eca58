"""Models trained elsewhere: other heads, norms, positions, tokenizers and special tokens; served in two steps."""

import hashlib
import io
import random
from dataclasses import asdict

import onnx
import pytest
import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tests.integration.untrained import end_sometimes

from dragoman.bundle import ModelBundle
from dragoman.cli.main import main
from dragoman.config import EngineConfig
from dragoman.errors import InvalidRequestError
from dragoman.pipeline import TextLimits
from dragoman.served_model import ServedModel
from dragoman.types import DecodingOptions
from dragoman_export.errors import ExportError
from dragoman_export.exporter import ExportOptions, export
from dragoman_export.targets import FP16
from dragoman_training.checkpoint import load_model, write_checkpoint
from dragoman_training.config import ModelShape
from dragoman_training.data import encode_source
from dragoman_training.decode import greedy
from dragoman_training.listed import ListedSentencePieceTokenizer
from dragoman_training.model import Transformer
from dragoman_training.record import FORMAT
from dragoman_training.tokenizer import PlainTokenizer, SpecialIds, file_names

LETTERS = "abcdefghijk"
WORDS = ["the", "a", "house", "garden", "dog", "runs", "over", "small", "green", "big", "tree", "with", "children"]
MOST = 12  # tokens

SIZES = {"ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}


def written(folder, shape, tokenizers, special, sources, **record):
    """A checkpoint as an import leaves it: a model of strong opinions that ends its answers, and no training."""
    config = ModelShape(**{**SIZES, **shape}).with_vocabularies(*map(len, tokenizers))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Transformer(config).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    end_sometimes(model, special, [encode_source(tokenizers[0], text, special) for text in sources], 1 / 6)
    files = file_names(*tokenizers)
    sides = {
        side: {
            "file": files[side],
            "sha256": hashlib.sha256(tokenizer.to_bytes()).hexdigest(),
            "num_tokens": len(tokenizer),
        }
        for side, tokenizer in zip(("source", "target"), tokenizers, strict=True)
    }
    whole = {
        "format": FORMAT,
        "model": asdict(config),
        "special_ids": special.as_dict(),
        "tokenizers": sides,
        "limits": {"max_source_tokens": MOST, "max_target_tokens": MOST},
        "import": {"kind": "by hand"},
        **record,
    }
    write_checkpoint(folder, dict(model.named_parameters()), tokenizers, whole, {})
    return folder


def padding(tokenizer):
    return tuple(range(len(tokenizer), -(-len(tokenizer) // 8) * 8))


def pieces_between_blanks():
    """Single letters between blanks, nothing around a source, <unk> at the end; nothing is forbidden."""
    source = PlainTokenizer("piece", ["<blank>", "<s>", "</s>", *LETTERS, "<unk>"], (0, 1, 2, 14), 14)
    target = PlainTokenizer("piece", ["<blank>", "<s>", "</s>", *LETTERS[:6], "<unk>"], (0, 1, 2, 9), 9)
    special = SpecialIds(unk=9, source_end=(), producible=(0, 1, 9), unused=padding(target))
    return (source, target), special


def letters(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(LETTERS, k=rng.randint(1, 10))) for _ in range(count)]


def marian():
    """Two SentencePiece models and one list: </s> first, <pad> last, which the decoder starts with; languages."""
    models = []
    for kind in ("unigram", "bpe"):
        file = io.BytesIO()
        lines = iter([" ".join(random.Random(i).choices(WORDS, k=6)) for i in range(200)])
        options = {"model_type": kind, "vocab_size": 60, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
        SentencePieceTrainer.train(sentence_iterator=lines, model_writer=file, **options)
        models.append(file.getvalue())
    libraries = [SentencePieceProcessor(model_proto=model) for model in models]
    pieces = {library.id_to_piece(i) for library in libraries for i in range(3, library.get_piece_size())}
    tokens = ["</s>", "<unk>", *sorted(pieces), ">>deu<<", ">>nld<<", "<pad>"]
    last = len(tokens) - 1
    tokenizers = tuple(ListedSentencePieceTokenizer(model, tokens, (0, 1, last), 1) for model in models)
    special = SpecialIds(
        pad=last, bos=last, eos=0, unk=1, decoder_start=last, source_end=(0,), unused=padding(tokenizers[1])
    )
    return tokenizers, special


def sentences(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(count)]


def expected(checkpoint, texts):
    """PyTorch's greedy answers: their tokens, and their text without <unk>."""
    sources = [encode_source(checkpoint.source_tokenizer, text, checkpoint.special) for text in texts]
    found = [answer.tokens for answer in greedy(checkpoint.model, sources, MOST, checkpoint.special)]
    target, unknown = checkpoint.target_tokenizer, checkpoint.special.unk
    tokens = [tuple(target.tokens[index] for index in answer) for answer in found]
    return tokens, [target.decode([index for index in answer if index != unknown]) for answer in found]


async def served(bundle, texts, language="", precision=None, **options):
    """What a server answers, each text as one line."""
    model = ServedModel.load(bundle, EngineConfig(), TextLimits(10_000, 100), precision=precision)
    model.start()
    try:
        result = await model.pipeline.generate("\n".join(texts), DecodingOptions(**options), language=language)
    finally:
        await model.close()
    found = [segment.hypotheses[0] for segment in result.segments]
    return [one.tokens for one in found], [one.text for one in found], found


async def test_narrow_heads_and_letters_between_blanks(tmp_path, capsys):
    """Heads of 4 in caches of 8, stored positions, other special tokens, a recorded head: by the command line alone."""
    tokenizers, special = pieces_between_blanks()
    shape = {
        "d_model": 32,
        "num_heads": 8,
        "decoder_layers": 2,
        "activation": "gelu_tanh",
        "num_positions": MOST,
        "tied_embeddings": "none",
    }
    recorded = {"layer": 0, "head": 5}
    folder = written(tmp_path / "c", shape, tokenizers, special, letters(20), alignment=recorded)
    arguments = ["export", folder, "--precision", "fp32,int8", "--alignment", "--out", tmp_path / "bundle"]
    assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err

    manifest = ModelBundle.load(tmp_path / "bundle").manifest
    assert (manifest.model.num_heads, manifest.model.head_dim) == (8, 8)
    assert manifest.quality == {"status": "unmeasured"} and "import" in manifest.provenance
    assert {"training", "data"}.isdisjoint(manifest.provenance)
    assert (manifest.alignment.layer, manifest.alignment.head, manifest.alignment.shift) == (0, 5, 0)
    for graphs in manifest.graphs:
        for graph in graphs.encoder, graphs.decoder:
            model = onnx.load(tmp_path / "bundle" / graph.file)
            nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
            assert len(nodes) == (1 if graph is graphs.encoder else 4)
            assert {a.f for node in nodes for a in node.attribute if a.name == "scale"} == {0.5}

    texts = letters(40, seed=1)
    tokens, answers = expected(load_model(folder), texts)
    assert len({*answers}) > 5 and any("<" in name for answer in tokens for name in answer)
    found = await served(tmp_path / "bundle", texts, precision="fp32", return_alignment=True)
    assert found[:2] == (tokens, answers)
    assert all(len(one.alignment) == len(one.tokens) for one in found[2])


async def test_two_models_one_list_and_languages(tmp_path):
    """Post-norm, silu, one matrix for all embeddings, the decoder's start at the list's end, a language by its name."""
    tokenizers, special = marian()
    shape = {"d_model": 64, "num_heads": 2, "norm_first": False, "activation": "silu", "tied_embeddings": "all"}
    texts = [f">>deu<< {text}" for text in sentences(30, seed=1)]
    checkpoint = load_model(written(tmp_path / "c", shape, tokenizers, special, texts))
    export(checkpoint, ExportOptions("m", "1", sources=tuple(texts)), tmp_path / "bundle")
    manifest = ModelBundle.load(tmp_path / "bundle").manifest
    assert manifest.tokenizers.source.kind == "sentencepiece+vocab"
    assert {file for file in manifest.files if "tokenizer" in file} == {
        "source.tokenizer.json",
        "target.tokenizer.json",
    }
    tokens, answers = expected(checkpoint, texts)
    assert len({*answers}) > 7
    assert await served(tmp_path / "bundle", texts) == (
        tokens,
        answers,
        *(await served(tmp_path / "bundle", texts))[2:],
    )
    plain = [text.removeprefix(">>deu<< ") for text in texts]
    assert (await served(tmp_path / "bundle", plain, "deu"))[:2] == (tokens, answers)
    assert (await served(tmp_path / "bundle", plain, "nld"))[1] != answers
    with pytest.raises(InvalidRequestError, match="'fra', which this model does not know: it has deu, nld"):
        await served(tmp_path / "bundle", plain, "fra")


async def test_stored_positions_and_a_norm_behind_them(tmp_path):
    """Embeddings without a scale, another epsilon; before a norm that comes first; fused for CUDA as ever."""
    tokenizers, special = pieces_between_blanks()
    shape = {
        "d_model": 48,
        "num_heads": 4,
        "activation": "gelu",
        "num_positions": MOST,
        "scaled_embeddings": False,
        "embedding_norm": True,
        "layer_norm_epsilon": 1e-3,
    }
    folder = written(tmp_path / "c", shape, tokenizers, special, letters(20))
    checkpoint = load_model(folder)
    proofs = export(checkpoint, ExportOptions("m", "1", targets=(FP16,)), tmp_path / "bundle").proofs
    nodes = proofs["fp16"].graphs.decoder.exported_nodes
    assert (nodes["SkipLayerNormalization"], nodes["LayerNormalization"], nodes["BiasGelu"]) == (4, 1, 1)
    parity = proofs["fp32"].parity
    assert parity.num_greedy_equal == parity.num_greedy_sources > 40


def test_limits_beyond_the_stored_positions_are_refused(tmp_path):
    """What lies behind the table's end has no position: the remedy is named, and nothing is written."""
    tokenizers, special = pieces_between_blanks()
    shape = {"d_model": 16, "num_heads": 2, "num_positions": MOST - 1}
    checkpoint = load_model(written(tmp_path / "c", shape, tokenizers, special, letters(5)))
    with pytest.raises(ExportError, match=r"limit is 12 tokens, and the model has 11 positions: lower max_source"):
        export(checkpoint, ExportOptions("m", "1", sources=tuple(letters(5))), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("place", [{"layer": 1, "head": 0}, {"layer": 0, "head": 2}, {"layer": -1, "head": None}])
def test_a_recorded_head_that_the_model_lacks_is_refused(tmp_path, place):
    """By its place: an alignment graph of it cannot be made."""
    tokenizers, special = pieces_between_blanks()
    shape = {"d_model": 16, "num_heads": 2}
    checkpoint = load_model(written(tmp_path / "c", shape, tokenizers, special, letters(5), alignment=place))
    with pytest.raises(
        ExportError, match=rf"head {place['head']} of decoder layer {place['layer']} aligns; .* 2 heads"
    ):
        export(checkpoint, ExportOptions("m", "1", alignment=True), tmp_path / "bundle")


def test_what_cannot_be_fused_for_cuda_is_refused(tmp_path):
    """Before anything is traced."""
    tokenizers, special = pieces_between_blanks()
    shape = {"d_model": 16, "num_heads": 2, "activation": "gelu_tanh"}
    checkpoint = load_model(written(tmp_path / "c", shape, tokenizers, special, letters(5)))
    with pytest.raises(ExportError, match="fp16: this version fuses no Gelu by a tanh for CUDA"):
        export(checkpoint, ExportOptions("m", "1", targets=(FP16,)), tmp_path / "bundle")


def test_ids_that_stand_for_text_cannot_start_or_end_it(tmp_path):
    """The field is named: PyTorch and the graphs would agree on the wrong one."""
    tokenizers, special = pieces_between_blanks()
    folder = written(tmp_path / "c", {"d_model": 16, "num_heads": 2}, tokenizers, special, letters(5))
    for change, message in (({"decoder_start": 4}, "decoder_start .* has 4"), ({"unk": 2}, r"unk .* is 2; .* is 9")):
        checkpoint = load_model(folder)
        object.__setattr__(checkpoint, "special", SpecialIds(**{**asdict(special), **change}))
        with pytest.raises(ExportError, match=rf"special_ids\.{message}"):
            export(checkpoint, ExportOptions("m", "1", sources=tuple(letters(5))), tmp_path / "bundle")
