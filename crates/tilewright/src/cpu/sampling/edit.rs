//! CPU logit edits: reads and writes only the tokens that an edit names.

use crate::{
    Cpu, Element, rows_mut,
    sampling::{Bias, History, LogitsEdit, LogitsEditing, Penalties, TokenBitmask},
    with_dtype,
};

/// A token of a history, and whether it is in the output.
type Occurrence = (u32, bool);

pub(in crate::cpu) fn edit_logits(cpu: &Cpu, operator: LogitsEditing<'_>) {
    let LogitsEditing { edit, logits } = operator;
    let masked = masked_rows(&edit, logits.shape()[0]);
    let vocab = logits.shape()[1];
    with_dtype!(logits.dtype(), T => {
        cpu.each_row(rows_mut::<T>(logits), vocab, Vec::new, |occurrences, row, logits| match &edit {
            LogitsEdit::Bitmask(bitmask) if masked[row] => apply_bitmask(logits, row, bitmask),
            LogitsEdit::Bitmask(_) => {}
            LogitsEdit::Penalties(penalties, history) => {
                apply_penalties(logits, row, &penalties[row], history, occurrences);
            }
            LogitsEdit::Bias(bias) => add_bias(logits, bias[row]),
        });
    });
}

/// Marks the rows to which a bitmask applies.
fn masked_rows(edit: &LogitsEdit<'_>, rows: usize) -> Vec<bool> {
    let LogitsEdit::Bitmask(TokenBitmask { rows: Some(chosen), .. }) = edit else {
        return vec![true; rows];
    };
    let mut masked = vec![false; rows];
    chosen.iter().for_each(|&row| masked[row as usize] = true);
    masked
}

fn apply_bitmask<T: Element>(logits: &mut [T], row: usize, bitmask: &TokenBitmask<'_>) {
    let words = TokenBitmask::words_per_row(logits.len());
    let excluded = T::from_f32(f32::NEG_INFINITY);
    let allowed = &bitmask.words.host().unwrap_or_default()[row * words..][..words];
    for (logits, &word) in logits.chunks_mut(32).zip(allowed) {
        if word == -1 {
            continue; // all tokens allowed: the common case in free text
        }
        for (bit, logit) in logits.iter_mut().enumerate() {
            *logit = if word >> bit & 1 == 1 { *logit } else { excluded };
        }
    }
}

fn add_bias<T: Element>(logits: &mut [T], bias: &[Bias]) {
    for &Bias { token, bias } in bias {
        let logit = &mut logits[token as usize];
        // Assign instead of adding: infinity - infinity is NaN.
        let sum = if bias == f32::NEG_INFINITY { bias } else { logit.to_f32() + bias };
        *logit = T::from_f32(sum);
    }
}

fn apply_penalties<T: Element>(
    logits: &mut [T],
    row: usize,
    penalties: &Penalties,
    history: &History<'_>,
    occurrences: &mut Vec<Occurrence>,
) {
    match *history {
        History::Tokens { prompt, output } => {
            occurrences.clear();
            occurrences.extend(prompt[row].iter().map(|&token| (token, false)));
            occurrences.extend(output[row].iter().map(|&token| (token, true)));
            occurrences.sort_unstable();
            for run in occurrences.chunk_by(|a, b| a.0 == b.0) {
                let count = run.iter().filter(|&&(_, of_output)| of_output).count();
                let logit = &mut logits[run[0].0 as usize];
                *logit = T::from_f32(penalized_logit(logit.to_f32(), count as f32, penalties));
            }
        }
        History::Counts { prompt, output } => {
            let start = row * logits.len();
            let counts = prompt[start..].iter().zip(&output[start..]);
            for (logit, (&in_prompt, &count)) in logits.iter_mut().zip(counts) {
                if in_prompt || count > 0 {
                    *logit = T::from_f32(penalized_logit(logit.to_f32(), count as f32, penalties));
                }
            }
        }
    }
}

/// The penalized logit of a token in the prompt or output, with `count` occurrences in the output.
fn penalized_logit(logit: f32, count: f32, penalties: &Penalties) -> f32 {
    let Penalties { repetition, presence, frequency } = *penalties;
    let repeated = if logit > 0.0 { logit / repetition } else { logit * repetition };
    if count == 0.0 { repeated } else { repeated - frequency * count - presence }
}
