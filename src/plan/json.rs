//! JSON input of `--json`.

use super::input::{MaskArg, PlanInput, RequestLengths};
use crate::{arguments::DtypeArg, text_error::TextError};
use miette::{Context, IntoDiagnostic, Report, Result};
use serde::{Deserialize, Deserializer, de::Error as _};
use std::{io::Read as _, path::Path};
use tilewright::{HeadDim, Heads, attention::Split};

const HELP: &str = "`tilewright plan --help` shows a whole file";

/// The schema of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    heads: [usize; 2],
    head_dim: OneOrTwo,
    #[serde(default)]
    dtype: DtypeArg,
    #[serde(default = "default_page_size")]
    page_size: usize,
    #[serde(default)]
    mask: MaskArg,
    #[serde(default, deserialize_with = "split")]
    split: Split,
    requests: Vec<[usize; 2]>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "head_dim is neither a number nor two of them")]
enum OneOrTwo {
    One(usize),
    Two([usize; 2]),
}

fn default_page_size() -> usize {
    16
}

fn split<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Split, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "split is neither \"balanced\", \"never\" nor a number of tokens")]
    enum SplitField {
        Tokens(usize),
        Name(String),
    }
    match SplitField::deserialize(deserializer)? {
        SplitField::Tokens(tokens) => Ok(Split::Fixed { tokens }),
        SplitField::Name(name) => {
            super::parse_split(&name).map_err(|why| D::Error::custom(format!("split: {why}")))
        }
    }
}

/// Reads `path`, or standard input if it is `-`.
pub(super) fn read(path: &Path) -> Result<PlanInput> {
    let (name, text) = if path == Path::new("-") {
        let mut text = String::new();
        ("standard input".to_owned(), std::io::stdin().read_to_string(&mut text).map(|_| text))
    } else {
        (path.display().to_string(), std::fs::read_to_string(path))
    };
    let text = text.into_diagnostic().wrap_err_with(|| format!("cannot read `{name}`"))?;
    let file: File = serde_json::from_str(&text).map_err(|why| explain(&why, &name, &text))?;
    let [qo, kv] = file.heads;
    Ok(PlanInput {
        heads: Heads { qo, kv },
        head_dim: match file.head_dim {
            OneOrTwo::One(dim) => HeadDim::same(dim),
            OneOrTwo::Two([qk, vo]) => HeadDim { qk, vo },
        },
        dtype: file.dtype.into(),
        page_size: file.page_size,
        mask: file.mask.into(),
        split: file.split,
        requests: file.requests.into_iter().map(|[qo, kv]| RequestLengths { qo, kv }).collect(),
    })
}

/// An error that points at the last character read; at the last character of the text if it ends too early.
fn explain(why: &serde_json::Error, name: &str, text: &str) -> Report {
    let line_start: usize = text.split_inclusive('\n').take(why.line().saturating_sub(1)).map(str::len).sum();
    let read = &text[..text.floor_char_boundary(line_start + why.column())];
    let read = if why.is_eof() { read.trim_end() } else { read };
    let (at, last) = read.char_indices().next_back().unwrap_or((0, ' '));
    let at = at..(at + last.len_utf8()).min(text.len());
    let reason = why.to_string();
    let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(reason, _)| reason);
    let message = format!("`{name}` is not a batch: {reason}");
    TextError::in_file(name, text, at, [message, "read up to here".to_owned(), HELP.to_owned()])
}
