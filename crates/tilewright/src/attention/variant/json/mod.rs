//! Variants as JSON: what a service or a configuration file can hold.
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
//! | `name` | as [`Variant::name`](super::Variant::name); the only one that must be there |
//! | `softmax`, `monotone_mask`, `linear_output` | as [`Properties`](super::Properties); `true`, `false` and `false` when left out |
//! | `scalars` | parameters: name and number |
//! | `tables` | name and array of numbers |
//! | `buffers` | name and number of elements |
//! | `query`, `key`, `update` | `[expression, expression]`: the pair, or maximum and sum |
//! | `value`, `logits`, `mask`, `output` | an expression |
//!
//! An expression is a number (also `"inf"`, `"-inf"`, `"nan"`), `true` or `false`, the name of an
//! [`Input`](super::Input) or a scalar, `{"read": ["table", index]}`, or `{"operation": operand}` with an array where an
//! [`Op`](super::Op) takes several operands. A hook may also be `{"let": [["name", expression], ..], "store":
//! [["buffer", index, value], ..], "in": result}`, with both first members optional; a bound name may be used in all that
//! follows.

mod read;
mod write;

const OPERATOR: &str = "attention.variant";
/// Expressions may be nested so deep; more needs `let`.
const MAX_DEPTH: usize = 64;
/// Members of the document that are no hooks.
const MEMBERS: [&str; 7] =
    ["name", "softmax", "monotone_mask", "linear_output", "scalars", "tables", "buffers"];
