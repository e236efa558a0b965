//! Rewriting of Jinja2 source into the subset that minijinja evaluates as Python would.
//!
//! 1. Line ends become `\n`.
//! 2. `{% generation %}` blocks, which mark answers for training, become plain blocks.
//! 3. String literals are decoded by Python's rules.
//! 4. A parenthesised tuple becomes `__tuple([...])`, `a % b` becomes `(a)|__mod(b)`, and so on for `/`, `//` and a single
//!    comparison.
//! 5. Operands of `~` pass `__str` and operands of `+` pass `__sized`, which print as Python does and bound the length.
//! 6. Long texts between tags become expressions, so that the printer counts every byte.
//! 7. Conditions and assignments pass `__timed`, and what a namespace keeps passes `__kept`, which bound time and nesting.
//!
//! The number of line ends is kept, so errors name the line of the template.

use super::{
    operands::{Insertions, refuse_constructs, refuse_test_of_in, wrap_operands, wrap_tuples},
    token::{Kind, Token, lex},
};

/// Texts between tags above this size become expressions.
const MAX_DATA: usize = 64;

/// Maximum nesting of blocks, and maximum `elif` of a template, each of which minijinja nests.
const MAX_BLOCKS: usize = 64;
const MAX_ELIFS: usize = 512;

/// An open block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    /// A loop, and whether its body may leave an iteration early.
    Loop {
        leaves: bool,
    },
    Other,
}

/// The open blocks at a tag, and the number of `elif` before it.
#[derive(Default)]
struct Nesting {
    blocks: Vec<Block>,
    elifs: usize,
}

impl Nesting {
    fn count(&mut self, tokens: &[Token]) -> Result<(), String> {
        match tokens.first().map_or("", |token| token.text.as_str()) {
            "set" if tokens.iter().any(|token| token.depth == 0 && token.text == "=") => {}
            "for" => self.blocks.push(Block::Loop { leaves: false }),
            "if" | "macro" | "call" | "filter" | "with" | "block" | "autoescape" | "set" | "generation" => {
                self.blocks.push(Block::Other);
            }
            "elif" => self.elifs += 1,
            "break" | "continue" => {
                let innermost = self.blocks.iter_mut().rev().find(|block| **block != Block::Other);
                innermost.into_iter().for_each(|block| *block = Block::Loop { leaves: true });
            }
            // Jinja2 renders the `else` of a loop of which no iteration reached its end.
            "else" if self.blocks.last() == Some(&Block::Loop { leaves: true }) => {
                return Err("an else after break or continue is not supported".to_owned());
            }
            name @ ("include" | "import" | "from" | "extends") => {
                return Err(format!("{name} is not supported: there are no other templates"));
            }
            name if name.starts_with("end") => drop(self.blocks.pop()),
            _ => {}
        }
        if self.blocks.len() > MAX_BLOCKS {
            return Err(format!("blocks are nested more than {MAX_BLOCKS} deep"));
        }
        if self.elifs > MAX_ELIFS { Err(format!("there are more than {MAX_ELIFS} elif")) } else { Ok(()) }
    }
}

/// The rewritten template; the error is the reason why it is not accepted.
pub(super) fn rewrite(source: &str) -> Result<String, String> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut text = String::with_capacity(source.len() * 2);
    let mut rest = source.as_str();
    let mut nesting = Nesting::default();
    while let Some(at) = find_tag(rest) {
        push_data(&mut text, &rest[..at]);
        rest = &rest[at..];
        let length = match &rest[..2] {
            "{#" => rest.find("#}").map(|end| end + 2).ok_or("a comment does not end")?,
            _ => push_tag(&mut text, rest, &mut nesting)?,
        };
        if rest.starts_with("{#") {
            text.push_str(&rest[..length]);
        }
        rest = &rest[length..];
    }
    push_data(&mut text, rest);
    Ok(text)
}

/// The start of the first tag or comment. One scan, because a template of many tags is scanned from each of them.
fn find_tag(text: &str) -> Option<usize> {
    let mut braces = text.match_indices('{').map(|(at, _)| at);
    braces.find(|&at| text[at + 1..].starts_with(['{', '%', '#']))
}

/// Writes a text between tags. Its first and last visible characters stay outside of the expression: tags may trim the
/// spaces around them.
fn push_data(text: &mut String, data: &str) {
    let visible = |c: char| !c.is_whitespace();
    let (first, last) = (data.find(visible), data.rfind(visible));
    let (Some(first), Some(last)) = (first, last) else { return text.push_str(data) };
    let start = data.ceil_char_boundary(first + 1);
    if data.len() <= MAX_DATA || start >= last {
        return text.push_str(data);
    }
    text.push_str(&data[..start]);
    let hidden = &data[start..last];
    text.push_str("{{ ");
    push_string(text, hidden, hidden.matches('\n').count());
    text.push_str(" }}");
    text.push_str(&data[last..]);
}

/// Writes a string literal of minijinja, and after it the line ends that the literal had.
fn push_string(text: &mut String, value: &str, num_lines: usize) {
    text.push('"');
    text.push_str(&value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"));
    text.push('"');
    text.extend(std::iter::repeat_n('\n', num_lines));
}

/// Writes the tag at the start of `rest` and returns its length. A raw block is one tag.
fn push_tag(text: &mut String, rest: &str, nesting: &mut Nesting) -> Result<usize, String> {
    let block = rest.starts_with("{%");
    let sign = rest[2..].starts_with(['-', '+']) as usize;
    let (mut tokens, end) = lex(&rest[2 + sign..], if block { "%}" } else { "}}" })?;
    let end = 2 + sign + end;
    if block {
        nesting.count(&tokens)?;
    }
    let only = if tokens.len() == 1 && block { tokens[0].text.as_str() } else { "" };
    match only {
        "raw" => {
            let length = raw_length(&rest[end..]).ok_or("a raw block does not end")?;
            text.push_str(&rest[..end + length]);
            return Ok(end + length);
        }
        "generation" => "with __generation = 1".clone_into(&mut tokens[0].text),
        "endgeneration" => "endwith".clone_into(&mut tokens[0].text),
        _ => {}
    }
    text.push_str(&rest[..2 + sign]);
    push_tokens(text, tokens, block)?;
    let close = rest[..end].trim_end_matches(['%', '}']);
    // The space before the end, with its sign.
    text.push_str(&close[close.trim_end_matches(['-', '+']).trim_end().len()..]);
    text.push_str(&rest[end - 2..end]);
    Ok(end)
}

/// The length of a raw block's text and of its end tag.
fn raw_length(rest: &str) -> Option<usize> {
    let mut at = 0;
    loop {
        at += rest[at..].find("{%")? + 2;
        let tag = rest[at..].trim_start_matches(['-', '+']).trim_start();
        if let Some(tail) = tag.strip_prefix("endraw") {
            let tail = tail.trim_start().trim_start_matches(['-', '+']);
            if let Some(after) = tail.strip_prefix("%}") {
                return Some(rest.len() - after.len());
            }
        }
    }
}

fn push_tokens(text: &mut String, mut tokens: Vec<Token>, block: bool) -> Result<(), String> {
    let mut insertions =
        Insertions { before: vec![String::new(); tokens.len()], after: vec![Vec::new(); tokens.len()] };
    let expression = expression_start(&tokens, block);
    refuse_test_of_in(&tokens, expression)?;
    wrap_operands(&mut tokens, expression, &mut insertions);
    wrap_expression(&tokens, expression, block, &mut insertions);
    refuse_constructs(&tokens, expression)?;
    let is_condition = block && ["if", "elif"].contains(&tokens.first().map_or("", |token| &token.text));
    let is_if = |token: &Token| token.depth == 0 && token.kind == Kind::Name && token.text == "if";
    if is_condition && tokens[expression.min(tokens.len())..].iter().any(is_if) {
        return Err("a condition that is an `if` expression needs parentheses".to_owned());
    }
    wrap_tuples(&mut tokens, expression)?;
    for (at, token) in tokens.iter().enumerate() {
        text.push_str(&token.space);
        text.push_str(&insertions.before[at]);
        match token.kind {
            Kind::String => push_string(text, &token.text, token.num_lines),
            _ => text.push_str(&token.text),
        }
        insertions.after[at].sort_by_key(|&(start, _)| std::cmp::Reverse(start));
        insertions.after[at].iter().for_each(|(_, close)| text.push_str(close));
    }
    Ok(())
}

/// The first token of the expression: after the keyword of a block, and after the targets of `for` and `set`.
fn expression_start(tokens: &[Token], block: bool) -> usize {
    let find =
        |text: &str| tokens.iter().position(|t| t.depth == 0 && t.text == text && t.kind != Kind::String);
    match tokens.first().map(|token| token.text.as_str()) {
        _ if !block => 0,
        Some("for") => find("in").map_or(tokens.len(), |at| at + 1),
        Some("set") => find("=").map_or(tokens.len(), |at| at + 1),
        // A call block may list parameters in parentheses of its own.
        Some("call" | "macro") => 2.min(tokens.len()),
        _ => 1.min(tokens.len()),
    }
}

/// Wraps the whole expression of a condition or an assignment.
fn wrap_expression(tokens: &[Token], first: usize, block: bool, insertions: &mut Insertions) {
    let keeps = tokens[..first.min(tokens.len())].iter().any(|token| token.text == ".");
    let name = tokens.first().map_or("", |token| token.text.as_str());
    if !block || !matches!(name, "set" | "if" | "elif" | "for") || first >= tokens.len() {
        return;
    }
    // A loop ends its expression at a condition.
    let is_end = |token: &Token| {
        name == "for"
            && token.depth == 0
            && token.kind == Kind::Name
            && ["if", "recursive"].contains(&token.text.as_str())
    };
    let length = tokens[first..].iter().position(is_end).unwrap_or(tokens.len() - first);
    let Some(last) = (first + length).checked_sub(1).filter(|&last| last >= first) else { return };
    // A comma outside of brackets makes a tuple.
    let is_comma = |token: &Token| token.depth == 0 && token.text == "," && token.kind == Kind::Operator;
    let tuple = tokens[first..=last].iter().any(is_comma);
    let close = match (tuple, name == "set" && keeps) {
        (_, _) if name == "for" => {
            if tuple {
                "])|__iterable"
            } else {
                ")|__iterable"
            }
        }
        (false, false) => ")|__timed",
        (false, true) => ")|__kept",
        (true, false) => "])|__timed",
        (true, true) => "])|__kept",
    };
    insertions.before[first].insert_str(0, if tuple { "__tuple([" } else { "(" });
    insertions.after[last].push((0, close));
}
