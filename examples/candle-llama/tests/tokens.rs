//! Paged attention gives the tokens of candle's own attention.

use candle_core::{Device, Result};
use candle_llama::{Checkpoint, generate_with_candle, generate_with_pages};
use std::path::Path;

#[test]
fn a_batch_over_pages_gives_the_tokens_of_candle() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tilewright-small");
    let checkpoint = Checkpoint::read(&folder, &Device::Cpu)?;
    // token 0 begins a text; shorter than a page, one page exactly, longer than two pages
    let prompts: Vec<Vec<u32>> =
        [1, 16, 37].map(|len| (0..len).map(|i| i * (97 + len) % 4096).collect()).into();
    let paged = generate_with_pages(&checkpoint, &prompts, 40)?;
    for (prompt, paged) in prompts.iter().zip(paged) {
        let own = generate_with_candle(&checkpoint, prompt, 40)?;
        assert_eq!(own, paged, "after {} tokens", prompt.len());
        assert!(own.iter().any(|token| *token != own[0]), "the model repeats one token: {own:?}");
    }
    Ok(())
}
