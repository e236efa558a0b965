//! In-place edits of logits: token bitmasks, penalties and biases.
//!
//! Shapes: logits `[rows, vocab]`, any row stride; all lists u32 or f32. Entries of one row and token form one group,
//! so no two threads write the same logit.

use super::mass::Number;
use tilewright_ptx::{Builder, Invalid, Kernel, Value};

/// Threads per CTA; each handles one entry, or [`TOKENS_PER_MASK_THREAD`] logits.
pub const EDIT_THREADS: u32 = 128;
/// Logits per thread of [`mask_tokens`].
pub const TOKENS_PER_MASK_THREAD: u32 = 8;

/// Sets the logits of tokens with mask bit 0 to -inf. Parameters: logits, words `[.., words_per_row]`, rows; stride
/// (u64, in elements), vocab (u32). Grid: `[masked rows, ⌈vocab / (EDIT_THREADS · TOKENS_PER_MASK_THREAD)⌉, 1]`;
/// `rows` lists each masked row once.
///
/// # Errors
/// None.
pub fn mask_tokens<T: Number>(name: &str) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, EDIT_THREADS, |k| {
        let (logits, words, rows) =
            (k.global::<T>("logits"), k.global::<u32>("words"), k.global::<u32>("rows"));
        let (stride, vocab) = (k.param::<u64>("stride"), k.param::<u32>("vocab"));
        let row = rows.at(k.cta()).load().to_u64();
        let logits = logits.at_wide(row * stride);
        let words = words.at_wide(row * ((vocab - 1) / 32 + 1).to_u64());
        let excluded = T::narrow(k.constant(f32::NEG_INFINITY));
        let first = k.cta_y() * (EDIT_THREADS * TOKENS_PER_MASK_THREAD) + k.thread();
        for token in (0..TOKENS_PER_MASK_THREAD).map(|i| first + i * EDIT_THREADS) {
            k.when(token.lt(vocab), || {
                let allowed = (words.at(token >> 5).load() >> (token & 31)) & 1;
                k.when(allowed.eq(0), || logits.at(token).store(excluded));
            });
        }
    })
}

/// Calls `body` with row, token and two more words of the entry of this thread.
#[track_caller]
fn each_entry(k: &Builder, body: impl FnOnce([Value<'_, u32>; 4])) {
    let (entries, count) = (k.global::<u32>("entries"), k.param::<u32>("count"));
    let entry = k.cta() * EDIT_THREADS + k.thread();
    k.when(entry.lt(count), || body(entries.at_wide(entry.to_u64() * 4_u64).load_vector::<4>()));
}

/// Applies penalties. Parameters: entries `[count, 4]` (row, token, occurrences in the output, unused), count (u32);
/// logits, penalties `[rows, 4]` f32 (repetition, presence, frequency, unused), stride (u64, in elements). Grid:
/// `[⌈count / EDIT_THREADS⌉, 1, 1]`.
///
/// # Errors
/// None.
pub fn penalise<T: Number>(name: &str) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, EDIT_THREADS, |k| {
        each_entry(k, |[row, token, count, _]| {
            let (logits, penalties) = (k.global::<T>("logits"), k.global::<f32>("penalties"));
            let stride = k.param::<u64>("stride");
            let [repetition, presence, frequency, _] =
                penalties.at_wide(row.to_u64() * 4_u64).load_vector::<4>();
            let at = logits.at_wide(row.to_u64() * stride + token.to_u64());
            let logit = T::widen(at.load());
            let repeated = logit.gt(0.0).select(logit / repetition, logit * repetition);
            let present = repeated - frequency * count.to_f32() - presence;
            at.store(T::narrow(count.eq(0).select(repeated, present)));
        });
    })
}

/// Adds biases. Parameters: entries `[count, 4]` (row, token, begin and end of its biases), count (u32); logits,
/// biases f32, stride (u64, in elements). Each sum is rounded; a bias of -inf excludes the token whatever its logit.
/// Grid: `[⌈count / EDIT_THREADS⌉, 1, 1]`.
///
/// # Errors
/// None.
pub fn add_bias<T: Number>(name: &str) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, EDIT_THREADS, |k| {
        each_entry(k, |[row, token, begin, end]| {
            let (logits, biases) = (k.global::<T>("logits"), k.global::<f32>("biases"));
            let stride = k.param::<u64>("stride");
            let at = logits.at_wide(row.to_u64() * stride + token.to_u64());
            let logit = k.var("logit", T::widen(at.load()));
            k.repeat((begin, end), 1, |i| {
                let bias = biases.at(i).load();
                // no addition: inf - inf would be NaN, and a NaN logit would stay
                let sum = bias.eq(f32::NEG_INFINITY).select(bias, logit.get() + bias);
                logit.set(T::widen(T::narrow(sum)));
            });
            at.store(T::narrow(logit.get()));
        });
    })
}
