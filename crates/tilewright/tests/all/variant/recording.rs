//! Recorded hooks: equal to the hooks, recorded once, and unchanged by a JSON round trip.

use super::problem;
use tilewright::{
    attention::variant::{
        Alibi, At, AttentionSinks, Both, DocumentMask, DumpLogits, ExpressionVariant, FlashSigmoid,
        HeadScales, Hook, MultiItemScoring, Number, Plain, PrefixLm, RelativePositionBias, RotaryEmbedding,
        SoftCap, Variant, expression::Node,
    },
    cpu::Trial,
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
    assert_eq!((a.scalars(), a.tables(), a.has_softmax()), (b.scalars(), b.tables(), b.has_softmax()));
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
fn monotone_masks_are_derived() {
    let monotone = |mask: &str| {
        let text = format!(r#"{{"name": "x", "tables": {{"t": [1, 2]}}, "mask": {mask}}}"#);
        ExpressionVariant::from_json(&text).unwrap().has_monotone_mask()
    };
    for mask in [
        "true",
        "false",
        r#"{"le": ["kv", "qo"]}"#,
        r#"{"not": {"lt": ["qo", "kv"]}}"#,
        r#"{"lt": [{"neg": "qo"}, {"sub": ["qo", "kv"]}]}"#,
        r#"{"lt": [{"floor": {"add": [7, "kv"]}}, {"read": ["t", "request"]}]}"#,
        r#"{"and": [{"lt": ["kv", 9]}, {"or": [{"le": ["kv", "qo"]}, {"eq": ["qo_head", 0]}]}]}"#,
        r#"{"le": [{"select": [{"lt": ["qo", 4]}, "kv", {"max": ["kv", 3]}]}, {"min": ["qo", 99]}]}"#,
    ] {
        assert!(monotone(mask), "{mask}");
    }
    for mask in [
        r#"{"lt": ["qo", "kv"]}"#,
        r#"{"not": {"lt": ["kv", "qo"]}}"#,
        r#"{"eq": ["kv", "qo"]}"#,
        r#"{"le": [{"sub": ["qo", "kv"]}, 4]}"#,
        r#"{"and": [{"le": ["kv", "qo"]}, {"le": ["request", "kv"]}]}"#,
        r#"{"lt": [{"mul": ["kv", "qo"]}, 4]}"#,
        r#"{"lt": [{"add": ["kv", "kv"]}, 4]}"#,
        r#"{"lt": [{"read": ["t", "kv"]}, 2]}"#,
        r#"{"lt": [{"select": [{"lt": ["kv", 4]}, "kv", 0]}, 2]}"#,
    ] {
        assert!(!monotone(mask), "{mask}");
    }
    let names: Vec<String> = shipped()
        .iter()
        .filter(|recorded| recorded.is_live(Hook::Mask) && recorded.has_monotone_mask())
        .map(|recorded| recorded.name().to_owned())
        .collect();
    assert_eq!(names, ["prefix_lm"]);
}

#[test]
fn a_trial_shows_its_recording() {
    let trial = Trial::new(SoftCap::new(2.0).unwrap(), &problem(2, 2)).unwrap();
    assert_eq!(trial.recorded().scalars(), [("cap".to_owned(), 2.0)]);
}

/// A mask of the last keys, or of any.
fn mask_of(tail: Option<u32>) -> ExpressionVariant {
    let tail = tail.map_or(String::new(), |tail| format!(r#""mask_tail": {tail}, "#));
    let json = format!(r#"{{"name": "m", {tail}"mask": {{"lt": ["kv", "qo"]}}}}"#);
    ExpressionVariant::from_json(&json).unwrap_or_else(|why| panic!("{why}"))
}

#[test]
fn limits_of_mask_hooks_are_kept_and_composed() {
    let cap = ExpressionVariant::of(&SoftCap::new(2.0).unwrap()).unwrap();
    let (short, long, any) = (mask_of(Some(8)), mask_of(Some(32)), mask_of(None));
    let tail = |first: &ExpressionVariant, second: &ExpressionVariant| {
        ExpressionVariant::of(&Both::new(first.clone(), second.clone())).unwrap().mask_tail()
    };
    assert_eq!([tail(&short, &cap), tail(&cap, &long)], [Some(8), Some(32)]);
    assert_eq!([tail(&short, &long), tail(&long, &any), tail(&any, &cap)], [Some(32), None, None]);
    assert_eq!(ExpressionVariant::from_json(&short.to_json()).unwrap().mask_tail(), Some(8));
    assert_ne!(short.fingerprint(), long.fingerprint());
    assert_ne!(short.fingerprint(), any.fingerprint());
    // a limit without a mask hook has no effect on the kernel
    let json = cap.to_json().replacen('{', r#"{"mask_tail": 8, "#, 1);
    let limited = ExpressionVariant::from_json(&json).unwrap();
    assert_eq!((limited.mask_tail(), limited.fingerprint()), (None, cap.fingerprint()));
}
