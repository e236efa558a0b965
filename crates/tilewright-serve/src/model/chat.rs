//! Chat templates: render messages to a prompt as `transformers` does.
//!
//! A template is code of the checkpoint's author. It has access only to the messages, the special tokens and the date. It has
//! a budget of instructions, nesting and output. Its result equals that of Jinja2, or it is refused.

mod clock;
mod filters;
mod json;
mod methods;
mod objects;
mod operands;
mod operators;
mod printf;
mod python;
mod syntax;
mod text;
mod token;

use super::{guarded, parse_object, read_optional};
use minijinja::{Environment, context};
use serde::Serialize;
use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    path::Path,
    thread::{self, ScopedJoinHandle},
};
use tilewright::{Error, Result, ensure};

const OPERATOR: &str = "model.chat";
const FILE: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";
const NAME: &str = "chat";

/// Maximum bytes of a template. The longest published ones have 20 KB.
const MAX_SOURCE: usize = 1 << 20;

/// Stack of the parser: 16 KiB per token of a tag, four times what a build without optimization needs.
const PARSER_STACK: usize = 64 << 20;

/// The special tokens passed to templates.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role of the template.
    pub role: String,
    /// The text of the turn.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A compiled chat template with the model's special tokens.
#[derive(Debug)]
pub struct ChatTemplate {
    /// The file or field that it came from, for errors.
    origin: &'static str,
    environment: Environment<'static>,
    tokens: BTreeMap<&'static str, String>,
}

impl ChatTemplate {
    /// Reads `dir/chat_template.jinja`, else `chat_template` of `dir/tokenizer_config.json`: a template, or a list with
    /// one named `default`. `None` if neither exists.
    ///
    /// # Errors
    /// When the folder does not exist, the template does not parse, or a list has no default.
    pub fn open(dir: &Path) -> Result<Option<Self>> {
        ensure!(dir.is_dir(), OPERATOR, "{}: there is no such folder", dir.display());
        let config = match read_optional(OPERATOR, dir, CONFIG)? {
            Some(text) => parse_object(OPERATOR, CONFIG, &text)?,
            None => Map::new(),
        };
        let (origin, source) = match read_optional(OPERATOR, dir, FILE)? {
            Some(text) => (FILE, Some(text)),
            None => (CONFIG, template_of_config(config.get("chat_template"))?),
        };
        let Some(source) = source else { return Ok(None) };
        let mut tokens = BTreeMap::new();
        for name in TOKENS {
            let token =
                config.get(name).and_then(|value| value.as_str().or_else(|| value["content"].as_str()));
            tokens.extend(token.map(|token| (name, token.to_owned())));
        }
        Self::parse(origin, &source, tokens).map(Some)
    }

    /// Compiles a template; `tokens` are its special tokens by their names in `tokenizer_config.json`.
    pub(super) fn parse(
        origin: &'static str,
        source: &str,
        tokens: BTreeMap<&'static str, String>,
    ) -> Result<Self> {
        let fail = |reason: String| {
            Error::new(OPERATOR, format!("the template of {origin} does not parse: {reason}"))
        };
        let len = source.len();
        if len > MAX_SOURCE {
            return Err(fail(format!("it has {len} bytes, the most is {MAX_SOURCE}")));
        }
        let source = syntax::rewrite(source).map_err(fail)?;
        let compile = || {
            let mut environment = python::environment();
            guarded::call(|| environment.add_template_owned(NAME, source).map(|()| environment))
                .unwrap_or_else(|| Err(minijinja::ErrorKind::SyntaxError.into()))
        };
        // The parser recurses over chains of operators, which `syntax` bounds.
        let parser = thread::Builder::new().stack_size(PARSER_STACK);
        let compiled = thread::scope(|scope| parser.spawn_scoped(scope, compile).map(ScopedJoinHandle::join));
        let compiled = compiled.map_err(|why| fail(format!("no thread: {why}")))?;
        let environment = compiled
            .unwrap_or_else(|_| Err(minijinja::ErrorKind::SyntaxError.into()))
            .map_err(|error| fail(reason(&error)))?;
        Ok(Self { origin, environment, tokens })
    }

    /// Renders the prompt for `messages`; `add_generation_prompt` appends the header of an assistant turn. Encode the
    /// result without special tokens: the template has written them.
    ///
    /// # Errors
    /// When the template rejects the messages (by `raise_exception`) or fails.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let refused = |error| {
            Error::new(OPERATOR, format!("the template of {} fails: {}", self.origin, reason(&error)))
        };
        let none = minijinja::Value::from(());
        let values = context! {
            messages,
            add_generation_prompt,
            // `transformers` passes none for these, and templates test for it.
            tools => none,
            documents => none,
            ..minijinja::Value::from_serialize(&self.tokens)
        };
        let render = || self.environment.get_template(NAME).and_then(|template| template.render(values));
        guarded::call(render)
            .unwrap_or_else(|| Err(minijinja::ErrorKind::InvalidOperation.into()))
            .map_err(refused)
    }
}

/// The template in the `chat_template` field of `tokenizer_config.json`.
fn template_of_config(value: Option<&Value>) -> Result<Option<String>> {
    let list = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(template)) => return Ok(Some(template.clone())),
        Some(Value::Array(list)) => list,
        Some(_) => {
            return Err(Error::new(OPERATOR, format!("{CONFIG}: chat_template is neither text nor list")));
        }
    };
    let named = |name: &str| list.iter().find(|entry| entry["name"].as_str() == Some(name));
    let default = named("default").and_then(|entry| entry["template"].as_str());
    default.map(|template| Some(template.to_owned())).ok_or_else(|| {
        let names: Vec<_> = list.iter().filter_map(|entry| entry["name"].as_str()).collect();
        Error::new(OPERATOR, format!("{CONFIG}: none of the chat templates {names:?} is named \"default\""))
    })
}

/// The error with its line, without the internal template name.
fn reason(error: &minijinja::Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    error.line().map_or_else(|| what.clone(), |line| format!("line {line}: {what}"))
}
