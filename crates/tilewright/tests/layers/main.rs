//! Norms, rotary embeddings and gated activations against the oracle.
//!
//! Properties are functions generic over [`tilewright::Backend`], `fn property<B: Backend>(backends: &[B])`, so that each backend is
//! judged by the same code; `judge_backends!` makes tests of them.

/// Makes a test of each property: the CPU backend.
macro_rules! judge_backends {
    ($($property:ident),+ $(,)?) => {
        mod cpu {
            $(#[test] fn $property() {
                super::$property(&[tilewright::Cpu::with_threads(2)]);
            })+
        }
    };
}
pub(crate) use judge_backends;

mod activation;
#[path = "../arrays/mod.rs"]
mod arrays;
mod norm;
mod rope;
