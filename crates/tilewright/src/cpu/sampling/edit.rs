//! Edits of logits on the CPU: only the tokens that an edit names are read and written.

use crate::{
    Cpu, Element, ViewMut,
    rows::rows_mut,
    sampling::{Bias, History, LogitsEdit, Penalties, TokenBitmask},
    with_dtype,
};

/// A token of a history, and whether it is of the output.
type Occurrence = (u32, bool);

pub(in crate::cpu) fn run(cpu: &Cpu, edit: &LogitsEdit<'_>, logits: ViewMut<'_>) {
    let masked = masked_rows(edit, logits.shape()[0]);
    let vocab = logits.shape()[1];
    with_dtype!(logits.dtype(), T => {
        cpu.each_row(rows_mut::<T>(logits), vocab, Vec::new, |seen, row, logits| match edit {
            LogitsEdit::Bitmask(bitmask) if masked[row] => mask(logits, row, bitmask),
            LogitsEdit::Bitmask(_) => {}
            LogitsEdit::Penalties(penalties, history) => {
                penalise(logits, &penalties[row], (row, history), seen);
            }
            LogitsEdit::Bias(bias) => add(logits, bias[row]),
        });
    });
}

/// Which rows a bitmask is for.
fn masked_rows(edit: &LogitsEdit<'_>, rows: usize) -> Vec<bool> {
    let LogitsEdit::Bitmask(TokenBitmask { rows: Some(chosen), .. }) = edit else {
        return vec![true; rows];
    };
    let mut masked = vec![false; rows];
    chosen.iter().for_each(|&row| masked[row as usize] = true);
    masked
}

fn mask<T: Element>(logits: &mut [T], row: usize, bitmask: &TokenBitmask<'_>) {
    let words = TokenBitmask::words_per_row(logits.len());
    let excluded = T::from_f32(f32::NEG_INFINITY);
    for (logits, &word) in logits.chunks_mut(32).zip(&bitmask.words[row * words..][..words]) {
        if word == -1 {
            continue; // all allowed, as in most words of most grammars' free text
        }
        for (bit, logit) in logits.iter_mut().enumerate() {
            *logit = if word >> bit & 1 == 1 { *logit } else { excluded };
        }
    }
}

fn add<T: Element>(logits: &mut [T], bias: &[Bias]) {
    for &Bias { token, bias } in bias {
        let logit = &mut logits[token as usize];
        // Not a sum: infinity less infinity would be NaN, and NaN would stay.
        let sum = if bias == f32::NEG_INFINITY { bias } else { logit.to_f32() + bias };
        *logit = T::from_f32(sum);
    }
}

fn penalise<T: Element>(
    logits: &mut [T],
    penalties: &Penalties,
    (row, history): (usize, &History<'_>),
    seen: &mut Vec<Occurrence>,
) {
    match *history {
        History::Tokens { prompt, output } => {
            seen.clear();
            seen.extend(prompt[row].iter().map(|&token| (token, false)));
            seen.extend(output[row].iter().map(|&token| (token, true)));
            seen.sort_unstable();
            for occurrences in seen.chunk_by(|a, b| a.0 == b.0) {
                let count = occurrences.iter().filter(|&&(_, of_output)| of_output).count();
                let logit = &mut logits[occurrences[0].0 as usize];
                *logit = T::from_f32(penalised(logit.to_f32(), count as f32, penalties));
            }
        }
        History::Counts { prompt, output } => {
            let start = row * logits.len();
            let counts = prompt[start..].iter().zip(&output[start..]);
            for (logit, (&in_prompt, &count)) in logits.iter_mut().zip(counts) {
                if in_prompt || count > 0 {
                    *logit = T::from_f32(penalised(logit.to_f32(), count as f32, penalties));
                }
            }
        }
    }
}

/// The logit of a token of prompt or output that the output has `count` times.
fn penalised(logit: f32, count: f32, penalties: &Penalties) -> f32 {
    let Penalties { repetition, presence, frequency } = *penalties;
    let repeated = if logit > 0.0 { logit / repetition } else { logit * repetition };
    if count == 0.0 { repeated } else { repeated - frequency * count - presence }
}
