//! Chat templates: render messages to a prompt as `transformers` does.
//!
//! A template is code of the checkpoint's author. It has access only to the messages, the special tokens and the date.

mod clock;
mod python;

use super::{parse_object, read_optional};
use minijinja::{Environment, context};
use serde::Serialize;
use serde_json::{Map, Value};
use std::{collections::BTreeMap, path::Path};
use tilewright::{Error, Result, ensure};

const OPERATOR: &str = "model.chat";
const FILE: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";
const NAME: &str = "chat";

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
        let source = match read_optional(OPERATOR, dir, FILE)? {
            Some(text) => Some(text),
            None => template_of_config(config.get("chat_template"))?,
        };
        let Some(source) = source else { return Ok(None) };
        let mut tokens = BTreeMap::new();
        for name in TOKENS {
            let token =
                config.get(name).and_then(|value| value.as_str().or_else(|| value["content"].as_str()));
            tokens.extend(token.map(|token| (name, token.to_owned())));
        }
        Self::parse(&source, tokens).map(Some)
    }

    fn parse(source: &str, tokens: BTreeMap<&'static str, String>) -> Result<Self> {
        let mut environment = python::environment();
        environment.add_template_owned(NAME, python::to_minijinja(source)).map_err(|error| {
            Error::new(OPERATOR, format!("the template does not parse: {}", reason(&error)))
        })?;
        Ok(Self { environment, tokens })
    }

    /// Renders the prompt for `messages`; `add_generation_prompt` appends the header of an assistant turn. Encode the
    /// result without special tokens: the template has written them.
    ///
    /// # Errors
    /// When the template rejects the messages (by `raise_exception`) or fails.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let refused = |error| Error::new(OPERATOR, format!("the template fails: {}", reason(&error)));
        let none = minijinja::Value::from(());
        let values = context! {
            messages,
            add_generation_prompt,
            // `transformers` passes none for these, and templates test for it.
            tools => none,
            documents => none,
            ..minijinja::Value::from_serialize(&self.tokens)
        };
        self.environment.get_template(NAME).and_then(|template| template.render(values)).map_err(refused)
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
