//! Recorded hooks: equal to the hooks, recorded once, and unchanged by a JSON round trip.

use super::problem;
use tilewright::{
    attention::variant::{
        Alibi, At, AttentionSinks, Both, DocumentMask, DumpLogits, ExpressionVariant, FlashSigmoid,
        HeadScales, Hook, MultiItemScoring, Number, Plain, PrefixLm, Properties, Reads, RelativePositionBias,
        RotaryEmbedding, SoftCap, Trial, Variant, expression::Node,
    },
    rope::Rope,
};

fn shipped() -> Vec<ExpressionVariant> {
    let of = [
        ExpressionVariant::of(&Plain),
        ExpressionVariant::of(&SoftCap::new(30.5).unwrap()),
        ExpressionVariant::of(&Alibi::new(6)),
        ExpressionVariant::of(&AttentionSinks::new(vec![0.25, -1e-20]).unwrap()),
        ExpressionVariant::of(&FlashSigmoid::new(-0.1)),
        ExpressionVariant::of(&RotaryEmbedding::new(&Rope::new(6, 1e4).unwrap()).unwrap()),
        ExpressionVariant::of(&RelativePositionBias::new(vec![0.1; 14], 3).unwrap()),
        ExpressionVariant::of(&HeadScales::new(vec![0.3, 2.0], vec![1.0, f32::MAX])),
        ExpressionVariant::of(&PrefixLm::new(&[3, 9]).unwrap()),
        ExpressionVariant::of(&DocumentMask::new(&[vec![0, 0, 1], vec![5]]).unwrap()),
        ExpressionVariant::of(&MultiItemScoring::new(&[2], &[vec![0, 1, 2]]).unwrap()),
        ExpressionVariant::of(&DumpLogits::new(0, 2, (3, 4)).unwrap()),
        ExpressionVariant::of(&Both::new(Alibi::new(2), SoftCap::new(30.0).unwrap())),
    ];
    of.into_iter().map(|recorded| recorded.expect("it can be recorded")).collect()
}

fn assert_same(a: &ExpressionVariant, b: &ExpressionVariant) {
    for hook in Hook::ALL {
        assert_eq!(a.graph(hook), b.graph(hook), "{}, {}", a.name(), hook.name());
    }
    assert_eq!((a.scalars(), a.tables(), a.properties()), (b.scalars(), b.tables(), b.properties()));
    assert_eq!(a.fingerprint(), b.fingerprint(), "{}", a.name());
    assert_eq!(a.to_json(), b.to_json());
}

#[test]
fn recording_is_idempotent() {
    for recorded in shipped() {
        assert_same(&ExpressionVariant::of(&recorded).unwrap(), &recorded);
    }
}

#[test]
fn json_gives_back_the_same_graphs() {
    for recorded in shipped() {
        let json = recorded.to_json();
        let read = ExpressionVariant::from_json(&json).unwrap_or_else(|why| panic!("{why}\n{json}"));
        assert_same(&read, &recorded);
    }
}

#[test]
fn only_nontrivial_hooks_are_active() {
    let live = |recorded: &ExpressionVariant| -> Vec<&str> {
        Hook::ALL.into_iter().filter(|hook| recorded.is_live(*hook)).map(Hook::name).collect()
    };
    let want: [&[&str]; 13] = [
        &[],
        &["logits"],
        &["logits"],
        &["update"],
        &["logits"],
        &["query", "key"],
        &["logits"],
        &["logits", "output"],
        &["mask"],
        &["mask"],
        &["mask"],
        &["logits"],
        &["logits"],
    ];
    for (recorded, want) in shipped().iter().zip(want) {
        assert_eq!(live(recorded), want, "{}", recorded.name());
    }
}

/// A variant with repeated subexpressions and constants.
#[derive(Debug, Clone)]
struct Repetitive;

impl Variant for Repetitive {
    fn name(&self) -> &str {
        "repetitive"
    }

    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        let six = at.number(2.0) * at.number(3.0);
        let _unused = (logit + six).tanh();
        let always = at.number(1.0).lt(six);
        let twice = logit * six + logit * six;
        N::select(always, twice, logit)
    }
}

#[test]
fn constants_are_folded_and_equal_nodes_shared() {
    let recorded = ExpressionVariant::of(&Repetitive).unwrap();
    let nodes = recorded.graph(Hook::Logits).nodes();
    // logit, 6, their product, its double
    assert_eq!(nodes.len(), 4, "{nodes:?}");
    assert!(nodes.contains(&Node::Number(6f32.to_bits())), "{nodes:?}");
    assert_eq!(recorded.graph(Hook::Logits).results(), [3]);
}

#[test]
fn fingerprints_depend_on_code_and_not_on_values() {
    let print = |json: &str| ExpressionVariant::from_json(json).unwrap().fingerprint();
    let of = |body: &str| print(&format!(r#"{{"name": "x", {body}}}"#));
    let one = of(r#""scalars": {"a": 1}, "logits": {"mul": ["logit", "a"]}"#);
    assert_eq!(one, of(r#""scalars": {"a": 2, "unused": 7}, "logits": {"mul": ["logit", "a"]}"#));
    assert_ne!(one, of(r#""scalars": {"a": 1}, "logits": {"mul": ["a", "logit"]}"#));
    assert_ne!(one, of(r#""scalars": {"b": 1}, "logits": {"mul": ["logit", "b"]}"#));
    assert_ne!(one, of(r#""scalars": {"a": 1}, "softmax": false, "logits": {"mul": ["logit", "a"]}"#));
}

#[test]
fn reads_are_inferred() {
    let reads: Vec<String> =
        shipped().iter().map(|recorded| recorded.properties().reads.to_string()).collect();
    let all = "request, qo, kv, tables";
    let want = [
        "",
        "",
        "qo, kv, qo_head, tables",
        "qo_head, tables",
        "",
        "qo, kv, tables",
        "qo, kv, qo_head, tables",
        "qo_head, tables",
        all,
        all,
        all,
        "request, qo, kv, qo_head",
        "qo, kv, qo_head, tables",
    ];
    assert_eq!(reads, want);
    assert_eq!(Properties::NONE.reading(Reads::KV).reads, Reads::KV);
}

#[test]
fn a_trial_shows_its_recording() {
    let trial = Trial::new(SoftCap::new(2.0).unwrap(), &problem(2, 2)).unwrap();
    assert_eq!(trial.recorded().scalars(), [("cap".to_owned(), 2.0)]);
}
