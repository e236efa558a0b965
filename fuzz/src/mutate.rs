//! Mutations of a corpus: bytes, runs of bytes, tokens of JSON and Jinja, and nodes of a JSON document.

use serde_json::{Map, Value, json};

/// Longest input in bytes.
const MAX_INPUT: usize = 64 << 10;

/// Fragments that readers treat specially.
const TOKENS: [&str; 48] = [
    "null",
    "true",
    "false",
    "0",
    "-1",
    "1",
    "2",
    "16",
    "65536",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "18446744073709551616",
    "1e308",
    "-1e-308",
    "1e999",
    "0.5",
    "NaN",
    "\"\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "{}",
    "[]",
    "[[",
    "{\"a\":",
    ",",
    ":",
    "}",
    "]",
    "\u{feff}",
    "\u{2581}",
    "<0xE2>",
    "{{",
    "}}",
    "{%",
    "%}",
    "{% for i in range(99999) %}",
    "{% endfor %}",
    "{% set x = x ~ x %}",
    "{% macro f() %}{{ f() }}{% endmacro %}",
    "{{ messages }}",
    " ~ messages",
    " | tojson",
    " | replace('a', 'aaaa')",
    "[::-1]",
    "* 9999999",
    "% 0",
    "loop.index",
];

/// Field names and texts that select other branches of a reader.
const NAMES: [&str; 40] = [
    "type", "content", "pattern", "Regex", "String", "(a+)+$", "a|b|", "Sequence", "Replace", "Strip",
    "Prepend", "ByteFallback", "Fuse", "Metaspace", "ByteLevel", "TemplateProcessing", "BPE", "Unigram",
    "WordPiece", "llama", "qwen3", "F32", "x", "default", "mistral", "gemma2", "gemma3_text", "phi3",
    "granite", "olmo2", "smollm3", "linear", "dynamic", "yarn", "longrope", "llama3", "sliding_attention",
    "full_attention", "gelu", "gelu_pytorch_tanh",
];

/// A stream of inputs.
pub(super) struct Mutator {
    state: u64,
    corpus: Vec<Vec<u8>>,
}

impl Mutator {
    pub(super) fn new(seed: u64, corpus: Vec<Vec<u8>>) -> Self {
        Self { state: seed, corpus }
    }

    /// A number in `0..end` (SplitMix64); 0 if `end` is 0.
    fn below(&mut self, end: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end.max(1) as u64) as usize
    }

    /// The next input: an entry of the corpus with one to eight mutations.
    pub(super) fn next(&mut self) -> Vec<u8> {
        let at = self.below(self.corpus.len());
        let mut input = self.corpus[at].clone();
        // A safetensors file starts with the length of its JSON header.
        let header = safetensors_header(&input);
        let document = match header {
            Some(end) => serde_json::from_slice::<Value>(&input[8..end]).ok(),
            None => serde_json::from_slice::<Value>(&input).ok(),
        };
        match document {
            Some(mut value) if self.below(3) > 0 => {
                for _ in 0..1 + self.below(3) {
                    self.change_node(&mut value, 0);
                }
                let text = value.to_string().into_bytes();
                input = match header {
                    Some(end) => {
                        [&(text.len() as u64).to_le_bytes()[..], text.as_slice(), &input[end..]].concat()
                    }
                    None => text,
                };
            }
            _ => {
                for _ in 0..1 + self.below(8) {
                    self.change_bytes(&mut input);
                }
            }
        }
        input.truncate(MAX_INPUT);
        input
    }

    fn change_bytes(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len() + 1);
        let end = (at + 1 + self.below(16)).min(input.len());
        match self.below(8) {
            0 if at < input.len() => input[at] ^= 1 << self.below(8),
            1 if at < input.len() => input[at] = self.below(256) as u8,
            2 => drop(input.drain(at.min(end)..end)),
            3 => {
                let piece = input[at.min(end)..end].to_vec();
                let repeated = piece.repeat(1 + self.below(64));
                drop(input.splice(at..at, repeated));
            }
            4 => {
                let other = self.below(self.corpus.len());
                let other = self.corpus[other].clone();
                let from = self.below(other.len());
                let to = (from + self.below(256)).min(other.len());
                drop(input.splice(at..at, other[from..to].iter().copied()));
            }
            5 => {
                let open = [&b"["[..], b"{\"a\":", b"(", b"{% if x %}", b"-", b"not "][self.below(6)];
                let nested = open.repeat(1 + self.below(2000));
                drop(input.splice(at..at, nested));
            }
            _ => {
                let token = TOKENS[self.below(TOKENS.len())];
                drop(input.splice(at..end.max(at), token.bytes()));
            }
        }
    }

    /// Changes a random node at or below `value`.
    fn change_node(&mut self, value: &mut Value, depth: usize) {
        let inside = depth < 12 && self.below(6) > 0;
        match value {
            Value::Array(items) if inside && !items.is_empty() => {
                let at = self.below(items.len());
                match self.below(12) {
                    0 => drop(items.remove(at)),
                    1 => {
                        let copies = 1 + self.below(64);
                        let copy = items[at].clone();
                        items.extend(std::iter::repeat_n(copy, copies));
                    }
                    _ => self.change_node(&mut items[at], depth + 1),
                }
            }
            Value::Object(fields) if inside && !fields.is_empty() => {
                let key = fields.keys().nth(self.below(fields.len())).cloned().unwrap_or_default();
                self.change_field(fields, &key, depth);
            }
            _ => *value = self.fresh(value),
        }
    }

    fn change_field(&mut self, fields: &mut Map<String, Value>, key: &str, depth: usize) {
        match self.below(12) {
            0 => drop(fields.remove(key)),
            1 => {
                let name = NAMES[self.below(NAMES.len())];
                let value = fields[key].clone();
                fields.insert(name.to_owned(), value);
            }
            _ => {
                if let Some(value) = fields.get_mut(key) {
                    self.change_node(value, depth + 1);
                }
            }
        }
    }

    /// A value in place of `old`.
    fn fresh(&mut self, old: &Value) -> Value {
        match self.below(10) {
            0 => Value::Null,
            1 => json!(self.below(2) == 0),
            2 => json!(self.below(40)),
            3 => json!(-(self.below(1 << 40) as i64)),
            4 => json!([0.0, 1e-30, 1e300, -2.5, 0.1][self.below(5)]),
            5 => json!([u64::MAX, 1 << 62, 1 << 32, (1 << 31) - 1][self.below(4)]),
            6 => json!(NAMES[self.below(NAMES.len())]),
            7 => json!(TOKENS[self.below(TOKENS.len())].repeat(1 + self.below(40))),
            8 => json!([old, old]),
            _ => json!({ "type": NAMES[self.below(NAMES.len())], "content": old }),
        }
    }
}

/// The end of the header of a safetensors file.
fn safetensors_header(input: &[u8]) -> Option<usize> {
    let length = u64::from_le_bytes(*input.first_chunk()?);
    let end = usize::try_from(length).ok()?.checked_add(8)?;
    (end <= input.len()).then_some(end)
}
