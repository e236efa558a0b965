//! Parsed spellings of instruction forms.

#[path = "../../src/text/spelling.rs"]
mod spelling;

use spelling::{
    Spelling,
    Token::{self, Address, Operand, Result, Word},
};
use tilewright_ptx::{
    Access, Builder, Op,
    isa::{
        copies::{CopyOp, Policy},
        memory::{Element, MemoryOp, Space},
        pure::PureOp,
    },
    text,
};

fn check_tokens(op: Op, expected: &[Token<'_>]) {
    let form = op.form();
    let all = Spelling::of(&form);
    let found: Vec<&Token<'_>> = all.tokens().iter().filter(|&token| *token != Word("")).collect();
    assert_eq!(found, expected.iter().collect::<Vec<_>>(), "{op:?}: {}", form.spelling);
}

#[test]
fn spellings_are_parsed_into_tokens() {
    check_tokens(
        Op::Pure(PureOp::AddU32),
        &[Word("add.u32 "), Result(0), Word(", "), Operand(0), Word(", "), Operand(1)],
    );
    check_tokens(
        Op::Memory(MemoryOp::Load(Space::Shared, Element::B32, 2, Access::Weak)),
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
    check_tokens(
        Op::Copy(CopyOp::Async(16, Policy::Operand)),
        &[
            Word("cp.async.cg.shared.global.L2::cache_hint.L2::128B "),
            Address(0),
            Word(", "),
            Address(2),
            Word(", 16, "),
            Operand(4),
            Word(", "),
            Operand(5),
        ],
    );
    check_tokens(
        Op::Copy(CopyOp::TensorLoad { dims: 2, ctas: 1, policy: Policy::Default }),
        &[
            Word("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "),
            Address(0),
            Word(", ["),
            Operand(2),
            Word(", "),
            Word("{"),
            Operand(6),
            Word(", "),
            Operand(7),
            Word("}"),
            Word("], "),
            Address(4),
        ],
    );
}

#[test]
fn rolled_loops_begin_with_a_pragma() {
    let kernel = Builder::kernel("count", 32, |k| {
        let x = k.global::<u32>("x");
        let n = k.param::<u32>("n");
        k.repeat_rolled((0, n), 1, |i| x.at(i).store(i));
        k.repeat((0, n), 1, |i| x.at(i).store(n));
    });
    let text = text::ptx(&kernel.unwrap(), 80).unwrap();
    let lines: Vec<_> = text::code_lines(&text).map(str::trim).collect();
    let after = |label| lines[lines.iter().position(|line| *line == label).unwrap() + 1];
    assert_eq!(after("$L1:"), ".pragma \"nounroll\";");
    assert!(after("$L3:").starts_with("setp."), "{}", after("$L3:"));
}

#[test]
fn gpus_newer_than_our_targets_get_the_text_of_the_newest() {
    let kernel = Builder::kernel("nothing", 32, |_| ()).unwrap();
    assert_eq!(text::ptx(&kernel, 121), text::ptx(&kernel, 120));
}
