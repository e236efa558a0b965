//! What flows out of a pipeline, as types.

/// Natural-log scores, which may be edited.
#[derive(Debug, Clone, Copy)]
pub struct Logits;

/// Logits with their temperature, after which they are not edited.
#[derive(Debug, Clone, Copy)]
pub struct Tempered;

/// Probabilities.
#[derive(Debug, Clone, Copy)]
pub struct Probs;

/// Drawn tokens.
#[derive(Debug, Clone, Copy)]
pub struct Tokens;

/// What a softmax can follow: [`Logits`] and [`Tempered`].
pub trait Unnormalised: Drawable {}
impl Unnormalised for Logits {}
impl Unnormalised for Tempered {}

/// What a draw can follow: [`Logits`], [`Tempered`] and [`Probs`].
pub trait Drawable: sealed::Sealed {}
impl Drawable for Logits {}
impl Drawable for Tempered {}
impl Drawable for Probs {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Logits {}
    impl Sealed for super::Tempered {}
    impl Sealed for super::Probs {}
}
