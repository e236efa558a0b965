//! Limits of a `tokenizer.json`: the text or tokens that its steps make of one input byte or token, and its added tokens.
//!
//! A sequence of steps multiplies: forty replacements of `a` by `aa` would make 10^12 bytes of one. The library would abort the
//! process for lack of memory, so such a file is refused before the first text.

use serde::Deserialize;
use serde_json::Value;

/// Published tokenizers stay below 20: a 3-byte `▁` for each space, a prefix, and a token at each end.
const MAX_GROWTH: u64 = 1024;

/// Maximum steps of a part. Each regular expression takes milliseconds to compile; published parts have at most 10.
const MAX_STEPS: usize = 24;

/// Maximum bytes of an added token. The library's automaton takes quadratic time for repetitive ones: 2 s for 12 KB.
/// Published ones, runs of spaces among them, have less than 100.
const MAX_ADDED_TOKEN: usize = 256;

/// The parts of the file that transform text or tokens; all others are skipped while parsing.
#[derive(Deserialize)]
pub(super) struct Steps {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Value,
}

impl Steps {
    /// The reason to refuse the file, if there is one.
    pub(super) fn excess(&self) -> Option<String> {
        self.excessive_part().or_else(|| self.long_added_token())
    }

    fn excessive_part(&self) -> Option<String> {
        let parts = [
            ("normalizer", &self.normalizer),
            ("pre_tokenizer", &self.pre_tokenizer),
            ("post_processor", &self.post_processor),
            ("decoder", &self.decoder),
        ];
        parts.into_iter().find_map(|(name, part)| match (num_steps(part), growth(part)) {
            (steps, _) if steps > MAX_STEPS => {
                Some(format!("{name} has {steps} steps, expected at most {MAX_STEPS}"))
            }
            (_, growth) if growth > MAX_GROWTH => {
                Some(format!("{name} multiplies its input by up to {growth}, expected at most {MAX_GROWTH}"))
            }
            _ => None,
        })
    }

    fn long_added_token(&self) -> Option<String> {
        let tokens = self.added_tokens.as_array().into_iter().flatten();
        let len = tokens.filter_map(|token| token["content"].as_str()).map(str::len).max()?;
        (len > MAX_ADDED_TOKEN)
            .then(|| format!("added_tokens has a token of {len} bytes, expected at most {MAX_ADDED_TOKEN}"))
    }
}

/// The steps inside `step`.
fn inner_steps(step: &Value) -> impl Iterator<Item = &Value> {
    let lists = ["normalizers", "pretokenizers", "processors", "decoders"];
    lists.into_iter().filter_map(|key| step[key].as_array()).flatten()
}

/// The number of steps, `step` included.
fn num_steps(step: &Value) -> usize {
    1 + inner_steps(step).map(num_steps).sum::<usize>()
}

/// The product of the growth of `step` and of the steps inside it.
fn growth(step: &Value) -> u64 {
    inner_steps(step).fold(own_growth(step), |product, step| product.saturating_mul(growth(step)))
}

fn own_growth(step: &Value) -> u64 {
    let len = |value: &Value| value.as_str().map_or(0, str::len) as u64;
    let list = |value: &Value| value.as_array().map_or(0, Vec::len) as u64;
    match step["type"].as_str() {
        Some("Replace") => match len(&step["pattern"]["String"]) {
            // A regular expression, and an empty text, match between any two bytes.
            0 => 1 + len(&step["content"]),
            pattern => len(&step["content"]).div_ceil(pattern).max(1),
        },
        Some("Prepend") => 1 + len(&step["prepend"]),
        Some("ByteLevel" | "CTC" | "BPEDecoder") => 2,
        Some("Precompiled") => 4,
        Some("TemplateProcessing") => {
            let tokens = step["special_tokens"].as_object().into_iter().flatten();
            let longest = tokens.map(|(_, token)| list(&token["ids"])).max().unwrap_or(1).max(1);
            list(&step["single"]).max(1).saturating_mul(longest)
        }
        _ => 1,
    }
}
