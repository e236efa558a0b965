//! How an instruction is written, taken apart once for all instructions of its form: words, and what stands between them.

use crate::isa::{Form, Slot};

/// A part of an instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece<'f> {
    /// As it is.
    Word(&'f str),
    /// A result, by its place.
    Result(usize),
    /// An operand, by its place.
    Operand(usize),
    /// An address and its offset, by the place of the address.
    Address(usize),
}

/// The pieces of an instruction of a form, one after the other. [`Form::spelling`] says how they are noted there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Spelling<'f>(Vec<Piece<'f>>);

impl<'f> Spelling<'f> {
    pub(super) fn of(form: &'f Form) -> Self {
        let addresses = addresses(&form.operands);
        let operand = |at: usize| match addresses.contains(&at) {
            true => Piece::Address(at),
            false => Piece::Operand(at),
        };
        let mut spelling = Self(Vec::new());
        let mut rest = form.spelling.as_str();
        while let Some(at) = rest.find('$') {
            spelling.0.push(Piece::Word(&rest[..at]));
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix("*d") {
                rest = after;
                spelling.list((0..form.results.len()).map(Piece::Result));
            } else if let Some(after) = rest.strip_prefix('d') {
                rest = after;
                spelling.0.push(Piece::Result(0));
            } else if let Some(after) = rest.strip_prefix('*') {
                let (first, after) = number(after);
                let (end, after) = number(&after[1..]);
                rest = after;
                spelling.list((first..end).map(operand));
            } else if let Some(after) = rest.strip_prefix('#') {
                let (at, after) = number(after);
                rest = after;
                spelling.0.push(Piece::Operand(at));
            } else {
                let (at, after) = number(rest);
                rest = after;
                spelling.0.push(operand(at));
            }
        }
        spelling.0.push(Piece::Word(rest));
        spelling
    }

    /// Adds some in braces.
    fn list(&mut self, pieces: impl Iterator<Item = Piece<'f>>) {
        for (at, piece) in pieces.enumerate() {
            self.0.extend([Piece::Word(if at == 0 { "{" } else { ", " }), piece]);
        }
        self.0.push(Piece::Word("}"));
    }

    pub(super) fn pieces(&self) -> &[Piece<'f>] {
        &self.0
    }
}

/// Which operands are addresses, counting an address and its offset as two.
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

/// The number at the beginning of a text, and what follows it.
fn number(text: &str) -> (usize, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (text[..end].parse().unwrap_or_default(), &text[end..])
}

#[cfg(test)]
mod tests {
    use super::{
        Piece::{self, Address, Operand, Result, Word},
        Spelling,
    };
    use crate::isa::{
        Op,
        copies::Copy,
        memory::{Access, Element, Memory, Space},
        pure::Pure,
    };

    fn pieces(op: Op, is: &[Piece<'_>]) {
        let form = op.form();
        let all = Spelling::of(&form);
        // empty words are none
        let found: Vec<&Piece<'_>> = all.pieces().iter().filter(|&piece| *piece != Word("")).collect();
        assert_eq!(found, is.iter().collect::<Vec<_>>(), "{op:?}: {}", form.spelling);
    }

    #[test]
    fn a_spelling_is_taken_apart_as_its_form_notes_it() {
        pieces(
            Op::Pure(Pure::AddU32),
            &[Word("add.u32 "), Result(0), Word(", "), Operand(0), Word(", "), Operand(1)],
        );
        pieces(
            Op::Memory(Memory::Load(Space::Shared, Element::B32, 2, Access::Weak)),
            &[
                Word("ld.shared.v2.b32 "),
                Word("{"),
                Result(0),
                Word(", "),
                Result(1),
                Word("}"),
                Word(", "),
                Address(0),
            ],
        );
        pieces(
            Op::Copy(Copy::TensorStore(2)),
            &[
                Word("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group ["),
                Operand(0),
                Word(", "),
                Word("{"),
                Operand(4),
                Word(", "),
                Operand(5),
                Word("}"),
                Word("], "),
                Address(2),
            ],
        );
    }
}
