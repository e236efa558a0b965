//! Logits edits: the host groups entries by row and token, so that one thread updates each logit.

use super::vocab_of;
use crate::{
    backend::{Gpu, geometry::address},
    machine::Machine,
};
use std::collections::{BTreeMap, BTreeSet};
use tilewright::{
    Operator, Result, View,
    sampling::{Bias, History, LogitsEdit, LogitsEditing, Penalties, TokenBitmask},
};
use tilewright_kernels::sampling::{EDIT_THREADS, SamplingKernel, TOKENS_PER_MASK_THREAD};
use tilewright_ptx::Arg;

/// Row, token, and two words whose meaning depends on the kernel.
type EditEntry = [u32; 4];

/// The logits to edit.
struct EditTarget<'a> {
    operator: &'static str,
    view: View<'a>,
    rows: usize,
    vocab: u32,
}

pub(in crate::backend) fn edit_logits<M: Machine>(gpu: &Gpu<M>, operator: LogitsEditing<'_>) -> Result<()> {
    let (name, view) = (operator.name(), operator.logits.as_view());
    let ([rows, vocab], dtype) = ([view.shape()[0], view.shape()[1]], view.dtype());
    let logits = EditTarget { operator: name, view, rows, vocab: vocab_of(name, vocab)? };
    match &operator.edit {
        LogitsEdit::Bitmask(bitmask) => mask(gpu, &logits, bitmask),
        LogitsEdit::Penalties(penalties, history) => {
            let entries = occurrences(history, vocab);
            let padded = |p: &Penalties| [p.repetition, p.presence, p.frequency, 0.0].map(f32::to_bits);
            let words: Vec<u32> = penalties.iter().flat_map(padded).collect();
            run(gpu, &logits, SamplingKernel::Penalise(dtype), &entries, &words)
        }
        LogitsEdit::Bias(bias) => {
            let (entries, biases) = groups(bias);
            run(gpu, &logits, SamplingKernel::AddBias(dtype), &entries, &biases)
        }
    }
}

fn mask<M: Machine>(gpu: &Gpu<M>, logits: &EditTarget<'_>, bitmask: &TokenBitmask<'_>) -> Result<()> {
    let chosen: Vec<u32> = match bitmask.rows {
        Some(rows) => rows.iter().copied().collect::<BTreeSet<_>>().into_iter().collect(),
        None => (0..logits.rows as u32).collect(),
    };
    if chosen.is_empty() {
        return Ok(());
    }
    let count = chosen.len() as u32;
    let dtype = logits.view.dtype();
    let kernel = gpu.sampling_kernel(logits.operator, SamplingKernel::MaskTokens(dtype))?;
    let (words, _uploaded) = gpu.integers(logits.operator, "bitmask", bitmask.words)?;
    // without a list of rows the launch allocates nothing after the first call, so that a graph can record it
    let (rows, _uncached) = match bitmask.rows {
        Some(_) => {
            let memory = gpu.upload(bytemuck::cast_slice(&chosen))?;
            (memory.address(), Some(memory))
        }
        None => gpu.constants(bytemuck::cast_slice(&(0..count.next_power_of_two()).collect::<Vec<_>>()))?,
    };
    let ctas = logits.vocab.div_ceil(EDIT_THREADS * TOKENS_PER_MASK_THREAD);
    let grid = [count, ctas, 1];
    let args = [
        Arg::U64(address(&logits.view)),
        Arg::U64(words),
        Arg::U64(rows),
        Arg::U64(logits.view.strides()[0] as u64),
        Arg::U32(logits.vocab),
    ];
    gpu.machine.launch(&kernel, grid, &args)
}

/// Runs a kernel with its entries and values.
fn run<M: Machine>(
    gpu: &Gpu<M>,
    logits: &EditTarget<'_>,
    kernel: SamplingKernel,
    entries: &[EditEntry],
    numbers: &[u32],
) -> Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let kernel = gpu.sampling_kernel(logits.operator, kernel)?;
    let count = entries.len() as u32;
    let entries = gpu.upload_words(entries.iter().flatten().copied())?;
    let numbers = gpu.upload_words(numbers.iter().copied())?;
    let args = [
        Arg::U64(entries.address()),
        Arg::U32(count),
        Arg::U64(address(&logits.view)),
        Arg::U64(numbers.address()),
        Arg::U64(logits.view.strides()[0] as u64),
    ];
    gpu.machine.launch(&kernel, [count.div_ceil(EDIT_THREADS), 1, 1], &args)
}

/// The tokens of each row's prompt or output, with their number of occurrences in the output.
fn occurrences(history: &History<'_>, vocab: usize) -> Vec<EditEntry> {
    match *history {
        History::Tokens { prompt, output } => {
            let of_row = |(row, (prompt, output)): (usize, (&&[u32], &&[u32]))| {
                let mut counts: BTreeMap<u32, u32> = prompt.iter().map(|&token| (token, 0)).collect();
                output.iter().for_each(|&token| *counts.entry(token).or_default() += 1);
                counts.into_iter().map(move |(token, count)| [row as u32, token, count, 0])
            };
            prompt.iter().zip(output).enumerate().flat_map(of_row).collect()
        }
        History::Counts { prompt, output } => {
            let entry = |(at, (&in_prompt, &count)): (usize, (&bool, &u32))| {
                let occurs = in_prompt || count > 0;
                occurs.then(|| [(at / vocab) as u32, (at % vocab) as u32, count, 0])
            };
            prompt.iter().zip(output).enumerate().filter_map(entry).collect()
        }
    }
}

/// The biases of each token of each row, adjacent and in their original order.
fn groups(bias: &[&[Bias]]) -> (Vec<EditEntry>, Vec<u32>) {
    let (mut entries, mut biases) = (Vec::new(), Vec::new());
    for (row, list) in bias.iter().enumerate() {
        let mut sorted = list.to_vec();
        sorted.sort_by_key(|bias| bias.token); // stable: keeps the order of a token's biases
        for group in sorted.chunk_by(|a, b| a.token == b.token) {
            let begin = biases.len() as u32;
            entries.push([row as u32, group[0].token, begin, begin + group.len() as u32]);
            biases.extend(group.iter().map(|bias| bias.bias.to_bits()));
        }
    }
    (entries, biases)
}
