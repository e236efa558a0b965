//! Messages to one prompt, by the chat template that comes with a model, as `transformers` renders it.
//!
//! The template is a program of the checkpoint's author. It sees the messages and the special tokens, and nothing
//! else but the date.

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

/// The special tokens that templates may write.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A turn of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A compiled chat template and the special tokens it may write.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: BTreeMap<&'static str, String>,
}

impl ChatTemplate {
    /// Reads `dir/chat_template.jinja`, else `chat_template` of `dir/tokenizer_config.json`: the template itself, or
    /// a list of which the one named `default` is taken. `None` where there is neither.
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
            None => configured(config.get("chat_template"))?,
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
        environment.add_template_owned(NAME, python::dialect(source)).map_err(|error| {
            Error::new(OPERATOR, format!("the template does not parse: {}", reason(&error)))
        })?;
        Ok(Self { environment, tokens })
    }

    /// The prompt for `messages`; `add_generation_prompt` appends what makes the model answer. Encode it without
    /// special tokens: the template has written them.
    ///
    /// # Errors
    /// When the template refuses the messages (by `raise_exception`) or does something it cannot.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let refused = |error| Error::new(OPERATOR, format!("the template fails: {}", reason(&error)));
        let none = minijinja::Value::from(());
        let values = context! {
            messages,
            add_generation_prompt,
            // Templates test these against none, as `transformers` passes them.
            tools => none,
            documents => none,
            ..minijinja::Value::from_serialize(&self.tokens)
        };
        self.environment.get_template(NAME).and_then(|template| template.render(values)).map_err(refused)
    }
}

/// The template in the field of `tokenizer_config.json`.
fn configured(value: Option<&Value>) -> Result<Option<String>> {
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

/// The error without the name of the template, which is ours, and with its line.
fn reason(error: &minijinja::Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    error.line().map_or_else(|| what.clone(), |line| format!("line {line}: {what}"))
}
