//! Continues prompts with candle's own attention and with paged attention; fails if their tokens differ.
//!
//! ```text
//! cargo run -p candle-llama [--features cuda] -- [PROMPT ...]
//! ```

use candle_core::{Device, Error, Result};
use candle_llama::{Checkpoint, generate_with_candle, generate_with_pages};
use std::path::Path;
use tokenizers::Tokenizer;

const COUNT: usize = 48;

fn main() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tilewright-small");
    let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).map_err(Error::msg)?;
    let device = Device::cuda_if_available(0)?; // the CPU without the feature `cuda`
    let checkpoint = Checkpoint::read(&folder, &device)?;

    let mut prompts: Vec<String> = std::env::args().skip(1).collect();
    if prompts.is_empty() {
        prompts = vec!["It was a dark night, and".into(), "The king".into()];
    }
    let encode =
        |prompt: &String| tokenizer.encode(prompt.as_str(), true).map(|text| text.get_ids().to_vec());
    let encoded: Vec<Vec<u32>> =
        prompts.iter().map(encode).collect::<std::result::Result<_, _>>().map_err(Error::msg)?;

    let paged = generate_with_pages(&checkpoint, &encoded, COUNT)?;
    for ((text, prompt), paged) in prompts.iter().zip(&encoded).zip(&paged) {
        let own = generate_with_candle(&checkpoint, prompt, COUNT)?;
        println!("candle: {own:?}\npaged:  {paged:?}");
        println!("{text}{}\n", tokenizer.decode(paged, true).map_err(Error::msg)?);
        if own != *paged {
            return Err(Error::msg(format!("tokens after {text:?} differ")));
        }
    }
    Ok(())
}
