//! Shipped variants against their formulas where attention with its positions does not reach: far positions, exact borders,
//! wide caps, tables that end, variants in sequence, and dumps out of range.

use super::{hook_case::HookCase, problem};
use tilewright::{
    attention::variant::{
        Alibi, Both, DocumentMask, DumpLogits, MultiItemScoring, PrefixLm, QueryRow, RotaryEmbedding, SoftCap,
    },
    cpu::{Isa, Trial},
    reference::{
        attention::Definition,
        rope::{frequency, llama31_frequency},
        variant as formula,
    },
    rope::{Rope, RopeScaling},
};

#[test]
fn soft_cap_is_its_formula() {
    for cap in [0.5, 30.0, 50.0, 1e6] {
        let variant = SoftCap::new(cap).unwrap();
        HookCase { variant, problem: &problem(2, 2), request: 0, roundings: 8.0 }
            .check(&formula::soft_cap(f64::from(cap)));
    }
}

#[test]
fn alibi_slopes_exist_for_every_number_of_heads() {
    for heads in 1..=130 {
        let (slopes, want) = (Alibi::slopes(heads), formula::alibi_slopes(heads));
        assert_eq!(slopes.len(), heads);
        for (head, (slope, want)) in slopes.iter().zip(want).enumerate() {
            let error = (f64::from(*slope) - want).abs();
            assert!(error <= want * 1e-7, "head {head} of {heads}: {slope} instead of {want}");
        }
    }
}

#[test]
fn rotary_embedding_is_accurate_at_far_positions() {
    let dim = 38;
    let frequencies: Vec<f64> = (0..dim / 2).map(|i| frequency(i, dim, 500_000.0)).collect();
    let rope = Rope::new(dim, 500_000.0).unwrap();
    // 1e-6 of the largest element
    let case = |rope: &Rope| RotaryEmbedding::new(rope).unwrap();
    HookCase { variant: case(&rope), problem: &problem(2, dim), request: 0, roundings: 16.0 }
        .check(&formula::rotary_embedding(&frequencies));

    let scaling = RopeScaling::Llama31 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    let scaled: Vec<f64> =
        frequencies.iter().map(|f| llama31_frequency(*f, (8.0, 1.0, 4.0), 8192.0)).collect();
    let rope = rope.with_scaling(scaling).unwrap();
    HookCase { variant: case(&rope), problem: &problem(2, dim), request: 0, roundings: 16.0 }
        .check(&formula::rotary_embedding(&scaled));
}

#[test]
fn prefix_lm_prefix_is_visible_to_all_rows() {
    let lens = [5, 0, 63];
    for (request, &len) in lens.iter().enumerate() {
        let variant = PrefixLm::new(&lens).unwrap();
        HookCase { variant, problem: &problem(2, 2), request: request as u32, roundings: 0.0 }
            .check(&formula::prefix_lm(len as usize));
    }
}

#[test]
fn documents_are_masked_from_each_other() {
    let first: Vec<u32> = (0..70).map(|j| j / 6).collect();
    let documents = [first, Vec::new(), vec![9, 9, 4, 9, 4, 4]];
    let variant = DocumentMask::new(&documents).unwrap();
    for (request, documents) in documents.iter().enumerate() {
        HookCase {
            variant: variant.clone(),
            problem: &problem(2, 2),
            request: request as u32,
            roundings: 0.0,
        }
        .check(&formula::document_mask(documents));
    }
    HookCase { variant, problem: &problem(2, 2), request: 3, roundings: 0.0 }
        .check(&formula::document_mask(&[]));
}

#[test]
fn items_attend_to_the_prefix_and_themselves() {
    let prefix_lens = [4, 0, 1];
    let places = [vec![0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0], vec![1, 2, 0, 1, 2, 3, 4, 5], vec![0; 40]];
    let variant = MultiItemScoring::new(&prefix_lens, &places).unwrap();
    for (request, places) in places.iter().enumerate() {
        HookCase {
            variant: variant.clone(),
            problem: &problem(2, 2),
            request: request as u32,
            roundings: 0.0,
        }
        .check(&formula::multi_item_scoring(prefix_lens[request] as usize, places));
    }
}

#[test]
fn both_applies_one_after_the_other() {
    let slopes = formula::alibi_slopes(4);
    let (alibi, cap) = (formula::alibi(&slopes), formula::soft_cap(20.0));
    let definition = Definition {
        logit: Box::new(|at, s| (cap.logit)(at, (alibi.logit)(at, s))),
        ..Definition::default()
    };
    let variant = Both::new(Alibi::new(4), SoftCap::new(20.0).unwrap());
    HookCase { variant, problem: &problem(4, 2), request: 0, roundings: 8.0 }.check(&definition);

    let documents = vec![0, 0, 1, 1, 1, 0, 0, 2];
    let (inside, prefix) = (formula::document_mask(&documents), formula::prefix_lm(3));
    let visible = |at| (inside.visible)(at) && (prefix.visible)(at);
    let definition = Definition { visible: Box::new(visible), ..Definition::default() };
    let variant =
        Both::new(DocumentMask::new(std::slice::from_ref(&documents)).unwrap(), PrefixLm::new(&[3]).unwrap());
    HookCase { variant, problem: &problem(2, 2), request: 0, roundings: 0.0 }.check(&definition);
}

#[test]
fn dumped_logits_are_at_their_indices() {
    let (heads, qo_len, kv_len) = (2, 3, 70);
    for isa in Isa::available() {
        let dump = DumpLogits::new(1, heads, (qo_len, kv_len)).unwrap();
        let trial = Trial::new(dump.clone(), &problem(heads, 2)).unwrap().on(isa);
        // out of range in rows and keys, and in another request
        let kv: Vec<u32> = (0..kv_len + 5).collect();
        for (request, qo, head) in (0..2).flat_map(|r| (66..71).flat_map(move |q| [(r, q, 0), (r, q, 1)])) {
            let row = QueryRow { request, qo, qo_head: head, kv_head: 0 };
            let mut logits: Vec<f32> = kv.iter().map(|kv| logit(request, qo, head, *kv)).collect();
            let before = logits.clone();
            trial.logits(row, &kv, &mut logits);
            assert_eq!(logits, before, "{isa}: the logits are unchanged");
        }
        let expected = (0..heads as u32)
            .flat_map(|head| (67..70).flat_map(move |qo| (0..kv_len).map(move |kv| logit(1, qo, head, kv))));
        assert_eq!(dump.logits().values(), expected.collect::<Vec<f32>>(), "{isa}");
    }
}

fn logit(request: u32, qo: i32, head: u32, kv: u32) -> f32 {
    (kv + 100 * qo as u32 + 10_000 * head + 100_000 * request) as f32
}
