//! Errors of `Problem`, `Attention::new` and `Attention::plan`.

use super::refused;
use tilewright::{
    Attention, Batch, Cpu, HeadDim, Heads, KvLayout, PageTable, Plan, Problem, Result, Split,
    attention::Index, cpu::Isa,
};

const ONE: Heads = Heads { qo: 1, kv: 1 };

#[test]
fn invalid_problems() {
    let build = |qo, kv, qk, vo| Problem::builder(Heads { qo, kv }, HeadDim { qk, vo }).build();
    refused(build(0, 1, 8, 8), "attention.problem: qo heads = 0, expected at least 1");
    refused(build(1, 0, 8, 8), "attention.problem: kv heads = 0, expected at least 1");
    refused(build(1, 1, 0, 8), "attention.problem: head_dim.qk = 0, expected at least 1");
    refused(build(1, 1, 8, 0), "attention.problem: head_dim.vo = 0, expected at least 1");
    refused(build(8, 3, 8, 8), "attention.problem: qo heads = 8 is not a multiple of kv heads = 3");
    refused(build(2, 4, 8, 8), "attention.problem: qo heads = 2 is not a multiple of kv heads = 4");
    refused(build(65537, 1, 8, 8), "attention.problem: qo heads = 65537 is above 65536");
    let most = usize::MAX;
    refused(build(most, most, 8, 8), &format!("attention.problem: qo heads = {most} is above 65536"));
    for (scale, text) in [(0.0, "0"), (-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let problem = Problem::builder(ONE, HeadDim::same(8)).scale(scale).build();
        let text = format!("attention.problem: scale = {text}, expected a finite number above 0");
        refused(problem, &text);
    }
}

#[test]
fn unsupported_problems() {
    let cpu = Cpu::with_threads(1).unwrap().with_isa(Isa::Portable).expect("it is everywhere");
    let new = |qk, vo| {
        let problem = Problem::builder(ONE, HeadDim { qk, vo }).build().expect("it is sound");
        Attention::new(problem, cpu.clone()).map(|attention| *attention.problem())
    };
    refused(new(1025, 8), "attention.new: portable cannot do this: head_dim.qk = 1025 is above 1024");
    refused(new(8, 2000), "attention.new: portable cannot do this: head_dim.vo = 2000 is above 1024");
    let text = "head_dim.qk = 4096 is above 1024; head_dim.vo = 18446744073709551615 is above 1024";
    refused(new(4096, usize::MAX), &format!("attention.new: portable cannot do this: {text}"));
    assert!(new(1024, 1024).is_ok());
    let many = Problem::builder(Heads { qo: 65536, kv: 1 }, HeadDim::same(1024)).build();
    assert!(Attention::new(many.expect("it is sound"), cpu).is_ok(), "a large group overflows nothing");
}

#[test]
fn an_instruction_set_that_the_machine_lacks() {
    let available: Vec<String> = Isa::available().iter().map(Isa::to_string).collect();
    for isa in Isa::ALL {
        let cpu = Cpu::with_threads(1).unwrap().with_isa(isa);
        if isa.is_available() {
            assert_eq!(cpu.expect("the machine has it").isa(), isa);
        } else {
            let text = format!("cpu.with_isa: this machine has no {isa}, it has {}", available.join(", "));
            refused(cpu, &text);
        }
    }
}

fn plan_with(batch: &Batch<'_>, split: Split) -> Result<Plan> {
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(8)).layout(KvLayout::Hnd).build();
    Attention::new(problem.expect("it is sound"), Cpu::with_threads(1).unwrap())
        .expect("the CPU can do it")
        .plan_with(batch, split)
}

#[track_caller]
pub(super) fn plan_refuses(batch: &Batch<'_>, text: &str) {
    refused(plan_with(batch, Split::Balanced), &format!("attention.plan: {text}"));
}

/// Asserts the error of a table for two requests of one query row each.
#[track_caller]
fn table_refused<'a>(
    (indptr, indices, last_page_len): (impl Into<Index<'a>>, impl Into<Index<'a>>, impl Into<Index<'a>>),
    page_size: usize,
    text: &str,
) {
    plan_refuses(
        &Batch::paged(&[0, 1, 2], PageTable::new(indptr, indices.into(), last_page_len, page_size)),
        text,
    );
}

#[test]
fn page_tables_that_are_malformed() {
    table_refused((&[0, 1, 2], &[0, 1], &[1, 1]), 0, "page_size = 0, expected at least 1");
    table_refused((&[0, 1], &[0], &[1, 1]), 16, "kv indptr has 2 entries, expected num_requests + 1 = 3");
    table_refused((&[1, 1, 2], &[0, 1], &[1, 1]), 16, "kv indptr starts at 1, expected 0");
    table_refused((&[-1, 1, 2], &[0, 1], &[1, 1]), 16, "kv indptr starts at -1, expected 0");
    table_refused((&[0, 2, 1], &[0], &[1, 1]), 16, "request 1: kv indptr decreases from 2 to 1");
    table_refused((&[0, -5, 1], &[0], &[1, 1]), 16, "request 0: kv indptr decreases from 0 to -5");
    table_refused((&[0, 1, 3], &[0, 1], &[1, 1]), 16, "kv indptr ends at 3, but indices has 2 pages");
    table_refused((&[0, 1, 1], &[0, 1], &[1, 0]), 16, "kv indptr ends at 1, but indices has 2 pages");
    table_refused((&[0, 1, 2], &[0, -7], &[1, 1]), 16, "request 1: page = -7 is negative");
    table_refused((&[0, 1, 2], &[0, 1], &[1, 17]), 16, "request 1: last_page_len = 17 is not in 1..=16");
    table_refused((&[0, 1, 2], &[0, 1], &[0, 1]), 16, "request 0: last_page_len = 0 is not in 1..=16");
    table_refused((&[0, 1, 2], &[0, 1], &[-1, 1]), 16, "request 0: last_page_len = -1 is not in 1..=16");
    let text = "request 1: last_page_len = 3, expected 0 for a request without pages";
    table_refused((&[0, 1, 1], &[0], &[1, 3]), 16, text);
    table_refused((&[0, 1], &[0], &[1]), 16, "the page table has 1 requests, qo_indptr has 2");
}

#[test]
fn page_tables_with_numbers_that_are_too_large() {
    const MAX: i64 = i64::MAX;
    let wide = |page: i64| [0, page];
    table_refused((&[0, 1, 2], &wide(1 << 31), &[1, 1]), 16, "page = 2147483648 does not fit in 32 bits");
    table_refused(
        (&[0, 1, 2], &wide(-MAX), &[1, 1]),
        16,
        "page = -9223372036854775807 does not fit in 32 bits",
    );
    let text = "kv indptr ends at 9223372036854775807, but indices has 2 pages";
    table_refused((&[0, 1, MAX], &[0, 1], &[1, 1]), 16, text);
    let text = "request 1: kv indptr decreases from 9223372036854775807 to -9223372036854775808";
    table_refused((&[0, MAX, i64::MIN], &[0, 1], &[1, 1]), 16, text);
    let text = "request 0: last_page_len = 9223372036854775807 is not in 1..=16";
    table_refused((&[0, 1, 2], &[0, 1], &[MAX, 1]), 16, text);
    let text = "request 0: 3 pages of 18446744073709551615 tokens overflow";
    table_refused((&[0, 3, 3], &[0, 1, 2], &[1, 0]), usize::MAX, text);
    let text = "2 query rows and a longest request of 2147483648 tokens, the most is 2147483647";
    table_refused((&[0, 1, 1], &[0], &[1_i64 << 31, 0]), 1 << 40, text);
}

#[test]
fn ragged_batches_that_are_malformed() {
    let refuses = |qo: &[i64], kv: &[i64], text: &str| plan_refuses(&Batch::ragged(qo, kv), text);
    refuses(&[], &[], "qo_indptr has 0 entries, expected num_requests + 1 = 1");
    refuses(&[1, 2], &[0, 2], "qo_indptr starts at 1, expected 0");
    refuses(&[0, 3, 2], &[0, 2, 2], "request 1: qo_indptr decreases from 3 to 2");
    refuses(&[0, 1], &[0, 2, 2], "kv_indptr has 3 entries, expected num_requests + 1 = 2");
    refuses(&[0, 1, 2], &[0, 4], "kv_indptr has 2 entries, expected num_requests + 1 = 3");
    refuses(&[0, 1], &[2, 3], "kv_indptr starts at 2, expected 0");
    refuses(&[0, 1, 1], &[0, 3, 1], "request 1: kv_indptr decreases from 3 to 1");
    let rows = "9223372036854775807 query rows and a longest request of 2 tokens, the most is 2147483647";
    refuses(&[0, i64::MAX], &[0, 2], rows);
    let keys = "1 query rows and a longest request of 9223372036854775807 tokens, the most is 2147483647";
    refuses(&[0, 1], &[0, i64::MAX], keys);
}

#[test]
fn splits_that_divide_into_nothing_or_into_too_much() {
    let batch = Batch::ragged(&[0, 1], &[0, 2]);
    let none = plan_with(&batch, Split::Fixed { tokens: 0 });
    refused(none, "attention.plan: split = 0 tokens, expected at least 1 (or Split::Never)");
    assert!(plan_with(&batch, Split::Fixed { tokens: usize::MAX }).is_ok());

    let refuses = |heads: Heads, qo_len: i32, kv_len: i32, text: &str| {
        let problem = Problem::builder(heads, HeadDim::same(8)).build().expect("it is sound");
        let attention = Attention::new(problem, Cpu::with_threads(1).unwrap()).expect("the CPU can do it");
        let (qo_indptr, kv_indptr) = ([0, qo_len], [0, kv_len]);
        let batch = Batch::ragged(&qo_indptr, &kv_indptr);
        refused(attention.plan_with(&batch, Split::Fixed { tokens: 1 }), &format!("attention.plan: {text}"));
    };
    let items = "work items, the most is 16777216: fewer query rows or longer pieces are needed";
    refuses(ONE, 1, i32::MAX, &format!("33554432 {items}"));
    refuses(Heads { qo: 65536, kv: 65536 }, i32::MAX, 1, &format!("366503919616 {items}"));
    let rows = "4296015872 partial rows, the most is 4294967295: longer pieces or fewer levels are needed";
    refuses(Heads { qo: 65536, kv: 1 }, 1, 65552 * 64, rows);
}

#[test]
fn the_longest_batches_are_planned_and_explained_without_overflow() {
    let last_page_len = [i32::MAX];
    let table = PageTable::new(&[0, 1], &[0], &last_page_len, i32::MAX as usize);
    let batch = Batch::paged(&[0, 100_000], table);
    for split in [Split::Balanced, Split::Never, Split::Fixed { tokens: 1 << 24 }] {
        let plan = plan_with(&batch, split).expect("it is large, but sound");
        assert!(plan.explain().to_string().contains("work item"));
        assert!(plan.explain().flops > 1 << 50);
    }
}
