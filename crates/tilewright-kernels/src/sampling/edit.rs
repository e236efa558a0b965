//! Edits of logits in place: those that a bitmask excludes, and the few that a request names.
//!
//! Shapes: logits `[rows, vocab]`, a row any stride after the other; all lists u32 or f32. What a row has listed twice is one group, so that no two
//! threads have the same logit.

use super::mass::Number;
use tilewright_ptx::{
    build::{Builder, Value},
    ir::Kernel,
    verify::Invalid,
};

/// Threads of a CTA, each of which has an entry, or [`MASKED`] logits.
pub const EDIT_THREADS: u32 = 128;
/// Logits of a thread that masks.
pub const TOKENS_PER_MASK_THREAD: u32 = 8;

/// Sets logits to -inf whose bit is 0. Parameters: logits, words `[.., words_per_row]`, rows; stride (u64, in elements), vocab (u32). Grid: `[rows to
/// be masked, ⌈vocab / (EDIT_THREADS · MASKED)⌉, 1]`; `rows` names them, each once.
///
/// # Errors
/// None that a caller can cause.
pub fn mask_tokens<T: Number>(name: &str) -> Result<Kernel, Invalid> {
    Builder::kernel(name, EDIT_THREADS, |k| {
        let (logits, words, rows) =
            (k.global::<T>("logits"), k.global::<u32>("words"), k.global::<u32>("rows"));
        let (stride, vocab) = (k.param::<u64>("stride"), k.param::<u32>("vocab"));
        let row = rows.at(k.cta()).load().to_u64();
        let logits = logits.at_wide(row * stride);
        let words = words.at_wide(row * ((vocab - 1) / 32 + 1).to_u64());
        let excluded = T::of(k.constant(f32::NEG_INFINITY));
        let first = k.cta_y() * (EDIT_THREADS * TOKENS_PER_MASK_THREAD) + k.thread();
        for token in (0..TOKENS_PER_MASK_THREAD).map(|i| first + i * EDIT_THREADS) {
            k.when(token.lt(vocab), || {
                let allowed = (words.at(token >> 5).load() >> (token & 31)) & 1;
                k.when(allowed.eq(0), || logits.at(token).store(excluded));
            });
        }
    })
}

/// Calls `body` with row, token and two more words of this thread's entry of `entries`.
#[track_caller]
fn each_entry(k: &Builder, body: impl FnOnce([Value<'_, u32>; 4])) {
    let (entries, count) = (k.global::<u32>("entries"), k.param::<u32>("count"));
    let entry = k.cta() * EDIT_THREADS + k.thread();
    k.when(entry.lt(count), || body(entries.at_wide(entry.to_u64() * 4_u64).load_vector::<4>()));
}

/// Penalises tokens. Parameters: entries `[count, 4]` (row, token, how often the output has it, nothing), count (u32); logits, penalties `[rows,
/// 4]` f32 (repetition, presence, frequency, nothing), stride (u64, in elements). Grid: `[⌈count / EDIT_THREADS⌉, 1, 1]`.
///
/// # Errors
/// None that a caller can cause.
pub fn penalise<T: Number>(name: &str) -> Result<Kernel, Invalid> {
    Builder::kernel(name, EDIT_THREADS, |k| {
        each_entry(k, |[row, token, count, _]| {
            let (logits, penalties) = (k.global::<T>("logits"), k.global::<f32>("penalties"));
            let stride = k.param::<u64>("stride");
            let [repetition, presence, frequency, _] =
                penalties.at_wide(row.to_u64() * 4_u64).load_vector::<4>();
            let at = logits.at_wide(row.to_u64() * stride + token.to_u64());
            let logit = T::wide(at.load());
            let repeated = logit.gt(0.0).select(logit / repetition, logit * repetition);
            let present = repeated - frequency * count.to_f32() - presence;
            at.store(T::of(count.eq(0).select(repeated, present)));
        });
    })
}

/// Adds to tokens. Parameters: entries `[count, 4]` (row, token, the first and the end of its biases), count (u32); logits, biases f32, stride (u64, in
/// elements). Each sum is rounded; -inf excludes a token whatever its logit is. Grid: `[⌈count / EDIT_THREADS⌉, 1, 1]`.
///
/// # Errors
/// None that a caller can cause.
pub fn add_bias<T: Number>(name: &str) -> Result<Kernel, Invalid> {
    Builder::kernel(name, EDIT_THREADS, |k| {
        each_entry(k, |[row, token, begin, end]| {
            let (logits, biases) = (k.global::<T>("logits"), k.global::<f32>("biases"));
            let stride = k.param::<u64>("stride");
            let at = logits.at_wide(row.to_u64() * stride + token.to_u64());
            let logit = k.var("logit", T::wide(at.load()));
            k.repeat((begin, end), 1, |i| {
                let bias = biases.at(i).load();
                // not a sum: infinity less infinity would be NaN, and NaN would stay
                let sum = bias.eq(f32::NEG_INFINITY).select(bias, logit.get() + bias);
                logit.set(T::wide(T::of(sum)));
            });
            at.store(T::of(logit.get()));
        });
    })
}
