//! Typestates of a pipeline: the output of its last stage.

/// Natural-log scores that can still be edited.
#[derive(Debug, Clone, Copy)]
pub struct Logits;

/// Logits after the temperature, which can no longer be edited.
#[derive(Debug, Clone, Copy)]
pub struct ScaledLogits;

/// Probabilities.
#[derive(Debug, Clone, Copy)]
pub struct Probs;

/// Drawn tokens.
#[derive(Debug, Clone, Copy)]
pub struct Tokens;

/// Inputs of a softmax: [`Logits`] and [`ScaledLogits`].
pub trait Unnormalised: Drawable {}
impl Unnormalised for Logits {}
impl Unnormalised for ScaledLogits {}

/// Inputs of a draw: [`Logits`], [`ScaledLogits`] and [`Probs`].
pub trait Drawable: sealed::Sealed {}
impl Drawable for Logits {}
impl Drawable for ScaledLogits {}
impl Drawable for Probs {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Logits {}
    impl Sealed for super::ScaledLogits {}
    impl Sealed for super::Probs {}
}
