//! Times steps of a GGUF file of the Llama kind: `cargo run --release --example steps -- FILE [THREADS [ROWS...]]`.
//!
//! Each number of rows is timed as so many sequences that decode one token each; a number with a `p` before it is a
//! prompt of so many tokens. It prints milliseconds: of the fastest step, of the median, and of the median a row.

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Result};
use furnace_candle_decoder::batch::{Chunk, Output};
use furnace_candle_decoder::config::{Bounds, Config, LayerConfig, Rope};
use furnace_candle_decoder::decoder::Decoder;
use furnace_candle_decoder::kernels::Activation;
use furnace_candle_decoder::model::Model;
use furnace_candle_decoder::weights::Weights;

/// Where decoding begins.
const HELD: usize = 192;
const STEPS: usize = 30;
const PROMPTS: usize = 5;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let file = arguments.first().ok_or("which FILE?")?;
    let threads = arguments.get(1).map_or(Ok(2), |text| text.parse())?;
    let model = Arc::new(read(file, threads)?);
    let usual = ["1", "2", "4", "8", "16", "32", "p128", "p256"].map(String::from);
    for rows in if arguments.len() > 2 { &arguments[2..] } else { &usual[..] } {
        let (mut times, count) = match rows.strip_prefix('p') {
            Some(tokens) => (prompts(&model, tokens.parse()?)?, tokens.parse::<f64>()?),
            None => (steps(&model, rows.parse()?)?, rows.parse()?),
        };
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!("{rows:>5} rows  {:7.2}  {median:7.2}  {:6.3}", times[0], median / count);
    }
    Ok(())
}

fn decoder(model: &Arc<Model>, sequences: usize) -> furnace_candle_decoder::error::Result<Decoder> {
    Decoder::new(Arc::clone(model), Bounds { max_context: 512, max_open: sequences, kv_blocks: 16 * sequences })
}

fn chunk(state: u64, position: usize, count: usize) -> Chunk {
    let tokens = (0..count).map(|place| ((position + place) * 7919 % 40_000) as i64).collect();
    Chunk { state, tokens, position, output: Output::Last }
}

fn timed(decoder: &Decoder, batch: &[Chunk]) -> furnace_candle_decoder::error::Result<f64> {
    let start = Instant::now();
    decoder.step(batch)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

fn steps(model: &Arc<Model>, sequences: usize) -> furnace_candle_decoder::error::Result<Vec<f64>> {
    let decoder = decoder(model, sequences)?;
    let mut states = Vec::new();
    for _ in 0..sequences {
        let state = decoder.cache().open()?;
        decoder.step(&[chunk(state, 0, HELD)])?;
        states.push(state);
    }
    let batch = |position| states.iter().map(|&state| chunk(state, position, 1)).collect::<Vec<_>>();
    (0..STEPS).map(|step| timed(&decoder, &batch(HELD + step))).collect()
}

fn prompts(model: &Arc<Model>, tokens: usize) -> furnace_candle_decoder::error::Result<Vec<f64>> {
    let decoder = decoder(model, PROMPTS)?;
    let mut times = Vec::new();
    for _ in 0..PROMPTS {
        let state = decoder.cache().open()?;
        times.push(timed(&decoder, &[chunk(state, 0, tokens)])?);
    }
    Ok(times)
}

fn read(path: &str, threads: usize) -> std::result::Result<Model, Box<dyn std::error::Error>> {
    let mut file = File::open(path)?;
    let content = Content::read(&mut file)?;
    let size = |name: &str| -> Result<usize> {
        let value = content.metadata.get(&format!("llama.{name}"));
        Ok(value.ok_or_else(|| candle_core::Error::msg(format!("there is no {name}")))?.to_u32()? as usize)
    };
    let (hidden, heads, layers) = (size("embedding_length")?, size("attention.head_count")?, size("block_count")?);
    let mut weights = Weights::new();
    let mut vocab = 0;
    for name in content.tensor_infos.keys() {
        let tensor = content.tensor(&mut file, name, &Device::Cpu)?;
        let role = role(name);
        match *tensor.shape().dims() {
            [outputs, inputs] => {
                vocab = if role == "embed" { outputs } else { vocab };
                let stored = format!("{:?}", tensor.dtype()).replace('K', "_K");
                weights.add_matrix(&role, &stored, outputs, inputs, &tensor.data()?)?;
            }
            _ => weights.add_vector(&role, tensor.dequantize(&Device::Cpu)?.to_vec1()?),
        }
    }
    let head_dim = hidden / heads;
    let frequencies: Vec<f32> =
        (0..head_dim / 2).map(|pair| 1e5_f32.powf(-2.0 * pair as f32 / head_dim as f32)).collect();
    let config = Config {
        vocab_size: vocab,
        hidden_size: hidden,
        num_heads: heads,
        num_kv_heads: size("attention.head_count_kv")?,
        head_dim,
        intermediate_size: size("feed_forward_length")?,
        rms_norm_eps: 1e-5,
        activation: Activation::Silu,
        embedding_scale: 1.0,
        attention_scale: 1.0 / (head_dim as f32).sqrt(),
        residual_scale: 1.0,
        logit_scale: 1.0,
        attention_soft_cap: None,
        logit_soft_cap: None,
        ropes: vec![Rope { scales: vec![1.0; frequencies.len()], frequencies }],
        layers: vec![LayerConfig { window: None, rope: Some(0) }; layers],
    };
    Ok(Model::new(config, weights, threads)?)
}

/// Furnace's role of a tensor of a GGUF file.
fn role(name: &str) -> String {
    let names = [
        ("token_embd", "embed"),
        ("output_norm", "norm"),
        ("attn_norm", "attention.norm"),
        ("attn_q", "attention.q"),
        ("attn_k", "attention.k"),
        ("attn_v", "attention.v"),
        ("attn_output", "attention.o"),
        ("ffn_norm", "mlp.norm"),
        ("ffn_gate", "mlp.gate"),
        ("ffn_up", "mlp.up"),
        ("ffn_down", "mlp.down"),
        ("output", "head"),
    ];
    let name = name.trim_end_matches(".weight");
    let (prefix, last) = name
        .rsplit_once('.')
        .map_or((String::new(), name), |(block, last)| (format!("{}.", block.replace("blk.", "layers.")), last));
    let role = names.iter().find(|(theirs, _)| *theirs == last).map_or(last, |(_, ours)| ours);
    format!("{prefix}{role}")
}
