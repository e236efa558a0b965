//! Errors of constructing or checking a variant.

use super::problem;
use tilewright::{
    Problem, Result,
    attention::{
        HeadDim, Heads,
        variant::{
            Alibi, At, AttentionSinks, Both, DocumentMask, DumpLogits, ExpressionVariant, HeadScales,
            HookBuffer, MultiItemScoring, Number, PrefixLm, RelativePositionBias, RotaryEmbedding, SoftCap,
            Variant,
        },
    },
    cpu::Trial,
    rope::{Rope, RopeStyle},
};

fn text<T>(result: Result<T>) -> String {
    result.err().expect("it is refused").to_string()
}

/// The error of a variant in JSON; `body` follows its name, `wrong`.
fn refused(body: &str) -> String {
    let json = format!(r#"{{"name": "wrong", {body}}}"#);
    let variant = ExpressionVariant::from_json(&json).expect("it can be read");
    text(Trial::new(variant, &problem(2, 2)))
}

#[test]
fn hooks_read_only_available_inputs() {
    #[derive(Debug)]
    struct Wrong(u8);
    impl Variant for Wrong {
        fn name(&self) -> &str {
            "wrong"
        }
        fn value<N: Number>(&self, at: &At<N>, x: N) -> N {
            if self.0 == 0 { x + at.qo() } else { x }
        }
        fn update<N: Number>(&self, at: &At<N>, max: N, sum: N) -> (N, N) {
            (max, if self.0 == 1 { sum + at.dim() } else { sum })
        }
        fn output<N: Number>(&self, at: &At<N>, o: N) -> N {
            if self.0 == 2 { o * at.kv() } else { o }
        }
    }
    let of = |which| text(Trial::new(Wrong(which), &problem(2, 2)));
    assert_eq!(
        of(0),
        "attention.new: variant wrong: the value hook reads qo, expected only kv, kv_head, dim"
    );
    assert_eq!(
        of(1),
        "attention.new: variant wrong: the update hook reads dim, expected only request, qo, qo_head, kv_head"
    );
    assert_eq!(
        of(2),
        "attention.new: variant wrong: the output hook reads kv, expected only request, qo, qo_head, kv_head, dim"
    );
}

#[test]
fn an_update_needs_a_softmax() {
    assert_eq!(
        refused(r#""softmax": false, "update": ["max", {"add": ["sum", 1]}]"#),
        "attention.new: variant wrong: the update hook changes the softmax's state, and there is no softmax"
    );
}

#[test]
fn pairs_need_an_even_head_dim() {
    let variant = RotaryEmbedding::new(&Rope::new(6, 1e4).unwrap()).unwrap();
    let odd = Problem::builder(Heads { qo: 2, kv: 1 }, HeadDim { qk: 7, vo: 6 }).build().unwrap();
    assert_eq!(
        text(Trial::new(variant, &odd)),
        "attention.new: variant rotary_embedding: the query hook needs pairs, and head_dim_qk = 7 is odd"
    );
}

/// A variant whose logits hook is selected by a number.
#[derive(Debug)]
struct NumberedHook(u8, HookBuffer);

impl Variant for NumberedHook {
    fn name(&self) -> &str {
        if self.0 == 6 { "no name" } else { "named" }
    }
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        match self.0 {
            0 => logit + at.read("table", &[], logit),
            1 => logit * at.scalar("a", 1.0) * at.scalar("a", 2.0),
            2 => logit * at.scalar("a", 1.0) * at.read("a", &[2.0], logit),
            3 => logit * at.scalar("logit", 1.0),
            4 => (0..600).fold(logit, |sum, i| sum + at.number(i as f32)),
            7 => {
                at.store("empty", &HookBuffer::new(0), logit, logit);
                logit
            }
            8 => logit * at.scalar("2a", 1.0),
            _ => logit,
        }
    }
    fn mask<N: Number>(&self, at: &At<N>) -> N::Bool {
        if self.0 == 5 {
            at.store("buffer", &self.1, at.number(0.0), at.number(1.0));
        }
        at.always()
    }
}

#[test]
fn names_are_unique() {
    let of = |which| text(Trial::new(NumberedHook(which, HookBuffer::new(1)), &problem(2, 2)));
    assert_eq!(of(0), "attention.new: variant named: table \"table\" has 0 elements, expected 1 to 16777216");
    assert_eq!(of(1), "attention.new: variant named: \"a\" is given twice, differently");
    assert_eq!(of(2), "attention.new: variant named: \"a\" is given twice, differently");
    assert_eq!(
        of(3),
        "attention.new: variant named: \"logit\" has a meaning in every hook, expected another name"
    );
    assert_eq!(of(4), "attention.new: variant named: a hook computes more than 512 different values");
    assert_eq!(of(5), "attention.new: variant named: the mask hook stores, only the logits hook may");
    assert_eq!(
        of(6),
        "attention.new: variant no name: \"no name\" is no name: expected a letter, then letters, digits and _, at \
         most 256 in all"
    );
    assert_eq!(
        of(7),
        "attention.new: variant named: buffer \"empty\" has 0 elements, expected 1 to 16777216"
    );
    assert_eq!(
        of(8),
        "attention.new: variant named: \"2a\" is no name: expected a letter, then letters, digits and _, at most 64 in all"
    );
}

#[test]
fn parameters_are_checked_when_a_variant_is_made() {
    assert_eq!(text(SoftCap::new(0.0)), "attention.soft_cap: cap = 0, expected a normal number above 0");
    assert_eq!(
        text(SoftCap::new(f32::NAN)),
        "attention.soft_cap: cap = NaN, expected a normal number above 0"
    );
    assert_eq!(
        text(AttentionSinks::new(vec![0.0, f32::NEG_INFINITY])),
        "attention.attention_sinks: sinks[1] = -inf, expected a finite number"
    );
    assert_eq!(
        text(RelativePositionBias::new(vec![0.0; 9], 3)),
        "attention.relative_position_bias: the table has 9 elements, which is no multiple of 2 · reach + 1 = 7"
    );
    assert_eq!(
        text(RotaryEmbedding::new(&Rope::new(6, 1e4).unwrap().with_style(RopeStyle::Interleaved))),
        "attention.rotary_embedding: style = Interleaved, expected Neox: hooks are given pairs (i, i + head_dim / 2)"
    );
    assert_eq!(
        text(PrefixLm::new(&[0, 1 << 24])),
        "attention.prefix_lm: request 1: prefix_len = 16777216, expected a number below 16777216"
    );
    assert_eq!(
        text(DocumentMask::new(&[vec![], vec![0, 1 << 24]])),
        "attention.document_mask: request 1: documents[1] = 16777216, expected a number below 16777216"
    );
    assert_eq!(
        text(MultiItemScoring::new(&[1], &[])),
        "attention.multi_item_scoring: places has 0 lists, expected one for each of the 1 prefixes"
    );
    assert_eq!(
        text(DumpLogits::new(0, 4, (4096, 4096))),
        "attention.dump_logits: 4 heads x 4096 rows x 4096 keys, expected 1 to 16777216 logits"
    );
}

#[test]
fn variants_fit_their_problem() {
    let of = |variant: Alibi| text(Trial::new(variant, &problem(4, 2)));
    assert_eq!(
        of(Alibi::new(3)),
        "attention.new: variant alibi: slopes: 3, expected one for each of the 4 query heads"
    );
    let sinks = AttentionSinks::new(vec![0.0]).unwrap();
    assert_eq!(
        text(Trial::new(Both::new(Alibi::new(4), sinks), &problem(4, 2))),
        "attention.new: variant attention_sinks: sinks: 1, expected one for each of the 4 query heads"
    );
    assert_eq!(
        text(Trial::new(HeadScales::new(vec![1.0; 4], vec![1.0; 5]), &problem(4, 2))),
        "attention.new: variant head_scales: scales of outputs: 5, expected one for each of the 4 query heads"
    );
    assert_eq!(
        text(Trial::new(RelativePositionBias::new(vec![0.0; 9], 1).unwrap(), &problem(4, 2))),
        "attention.new: variant relative_position_bias: rows of the table: 3, expected one for each of the 4 query heads"
    );
    assert_eq!(
        text(Trial::new(DumpLogits::new(0, 2, (1, 1)).unwrap(), &problem(4, 2))),
        "attention.new: variant dump_logits: num_qo_heads: 2, expected one for each of the 4 query heads"
    );
    let rotary = RotaryEmbedding::new(&Rope::new(6, 1e4).unwrap()).unwrap();
    assert_eq!(
        text(Trial::new(rotary, &problem(2, 8))),
        "attention.new: variant rotary_embedding: rotary_dim = 6, expected head_dim_qk = 8"
    );
    let causal = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(2)).build().unwrap();
    assert_eq!(
        text(Trial::new(PrefixLm::new(&[1]).unwrap(), &causal)),
        "attention.new: variant prefix_lm: mask = causal, expected full: another would hide parts of prefixes"
    );
}
