//! JSON format of variants, for services and configuration files.
//!
//! ```json
//! {
//!   "name": "soft_cap",
//!   "scalars": { "cap": 30 },
//!   "logits": { "mul": ["cap", { "tanh": { "div": ["logit", "cap"] } }] }
//! }
//! ```
//!
//! | member | holds |
//! |---|---|
//! | `name` | as [`Variant::name`](super::Variant::name); the only required member |
//! | `softmax` | as [`Variant::has_softmax`](super::Variant::has_softmax); default `true` |
//! | `mask_tail` | as [`Variant::mask_tail`](super::Variant::mask_tail); a number of keys from 1, by default none |
//! | `scalars` | parameters: name and number |
//! | `tables` | name and array of numbers, or number of elements, which each run binds |
//! | `buffers` | name and number of elements |
//! | `query`, `key`, `update` | `[expression, expression]`: the pair, or maximum and sum |
//! | `value`, `logits`, `mask`, `output` | an expression |
//!
//! An expression is a number (also `"inf"`, `"-inf"`, `"nan"`), `true` or `false`, the name of an
//! [`Input`](super::Input) or a scalar, `{"read": ["table", index]}`, or `{"operation": operand}`, with an array if an
//! [`Op`](super::Op) takes several operands. A hook may also be `{"let": [["name", expression], ..], "store":
//! [["buffer", index, value], ..], "in": result}`, with `let` and `store` optional; a bound name is visible in all
//! later expressions.

mod read;
mod write;

const OPERATOR: &str = "attention.variant";
/// Maximum nesting of expressions; deeper ones need `let`.
const MAX_DEPTH: usize = 64;
/// Members of the document that are not hooks.
const MEMBERS: [&str; 6] = ["name", "softmax", "mask_tail", "scalars", "tables", "buffers"];
