//! The parsed spelling of an instruction form: literal words and placeholders, parsed once per form.

use crate::isa::{Form, Slot};

/// A token of a spelling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token<'f> {
    /// A literal.
    Word(&'f str),
    /// A result, by index.
    Result(usize),
    /// An operand, by index.
    Operand(usize),
    /// An address and its offset, by the index of the address.
    Address(usize),
}

/// The tokens of a form's spelling, in order. [`Form::spelling`] defines the notation.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Spelling<'f>(Vec<Token<'f>>);

impl<'f> Spelling<'f> {
    pub(super) fn of(form: &'f Form) -> Self {
        let addresses = addresses(&form.operands);
        let operand = |at: usize| match addresses.contains(&at) {
            true => Token::Address(at),
            false => Token::Operand(at),
        };
        let mut spelling = Self(Vec::new());
        let mut rest = form.spelling.as_str();
        while let Some(at) = rest.find('$') {
            spelling.0.push(Token::Word(&rest[..at]));
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix("*d") {
                rest = after;
                spelling.list((0..form.results.len()).map(Token::Result));
            } else if let Some(after) = rest.strip_prefix('d') {
                rest = after;
                spelling.0.push(Token::Result(0));
            } else if let Some(after) = rest.strip_prefix('*') {
                let (first, after) = number(after);
                let (end, after) = number(&after[1..]);
                rest = after;
                spelling.list((first..end).map(operand));
            } else if let Some(after) = rest.strip_prefix('#') {
                let (at, after) = number(after);
                rest = after;
                spelling.0.push(Token::Operand(at));
            } else {
                let (at, after) = number(rest);
                rest = after;
                spelling.0.push(operand(at));
            }
        }
        spelling.0.push(Token::Word(rest));
        spelling
    }

    /// Appends a list in braces.
    fn list(&mut self, tokens: impl Iterator<Item = Token<'f>>) {
        for (at, token) in tokens.enumerate() {
            self.0.extend([Token::Word(if at == 0 { "{" } else { ", " }), token]);
        }
        self.0.push(Token::Word("}"));
    }

    pub(super) fn tokens(&self) -> &[Token<'f>] {
        &self.0
    }
}

/// The indices of the address operands; an address and its offset count as two operands.
fn addresses(slots: &[Slot]) -> Vec<usize> {
    let mut at = 0;
    let mut addresses = Vec::new();
    for slot in slots {
        if matches!(slot, Slot::Address(_)) {
            addresses.push(at);
            at += 1;
        }
        at += 1;
    }
    addresses
}

/// Splits the leading integer off a text.
fn number(text: &str) -> (usize, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (text[..end].parse().unwrap_or_default(), &text[end..])
}
