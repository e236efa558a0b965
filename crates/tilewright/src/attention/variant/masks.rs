//! Masks per request: prefix LM, packed documents, multi-item scoring.

use super::{At, Number, Variant, lists::RequestLists};
use crate::{Mask, Problem, Result};

/// Causal with a bidirectional prefix per request: the query at `p` sees the key at `j` if `j <= p` or `j < prefix_len`
/// (prefix LM: T5, PaliGemma). For problems with [`Mask::Full`].
#[derive(Debug, Clone, PartialEq)]
pub struct PrefixLm {
    prefix_lens: Vec<f32>,
}

impl PrefixLm {
    /// `prefix_lens`: `[requests]`; later requests use the last prefix.
    ///
    /// # Errors
    /// When one is 2^24 or more.
    pub fn new(prefix_lens: &[u32]) -> Result<Self> {
        Ok(Self { prefix_lens: checked_lens("attention.prefix_lm", prefix_lens)? })
    }
}

fn checked_lens(operator: &'static str, prefix_lens: &[u32]) -> Result<Vec<f32>> {
    for (request, len) in prefix_lens.iter().enumerate() {
        crate::ensure!(
            *len < 1 << 24,
            operator,
            "request {request}: prefix_len = {len}, expected a number below 16777216"
        );
    }
    Ok(prefix_lens.iter().map(|len| *len as f32).collect())
}

impl Variant for PrefixLm {
    fn name(&self) -> &str {
        "prefix_lm"
    }

    fn check(&self, problem: &Problem) -> Result<()> {
        crate::ensure!(
            matches!(problem.mask(), Mask::Full),
            "attention.new",
            "variant prefix_lm: mask = {}, expected full: another would hide parts of prefixes",
            problem.mask()
        );
        Ok(())
    }

    #[inline(always)]
    fn mask<N: Number>(&self, at: &At<N>) -> N::Bool {
        let prefix_len = at.read("prefix_lens", &self.prefix_lens, at.request());
        at.kv().le(at.qo()) | at.kv().lt(prefix_len)
    }
}

/// Document mask for packed sequences: tokens see only tokens of their own document. Usually with a causal problem.
#[derive(Debug, Clone, PartialEq)]
pub struct DocumentMask {
    documents: RequestLists,
}

impl DocumentMask {
    /// `documents[r][j]`: the document of the token at position `j` of request `r`. A token without one sees no key and
    /// is not visible.
    ///
    /// # Errors
    /// When a document's number, or the total number of tokens, is not below 2^24.
    pub fn new(documents: &[Vec<u32>]) -> Result<Self> {
        Ok(Self {
            documents: RequestLists::new(
                "attention.document_mask",
                ["documents", "document_starts"],
                documents,
            )?,
        })
    }
}

impl Variant for DocumentMask {
    fn name(&self) -> &str {
        "document_mask"
    }

    #[inline(always)]
    fn mask<N: Number>(&self, at: &At<N>) -> N::Bool {
        let (qo_document, has_qo_document) = self.documents.at(at, at.qo());
        let (kv_document, has_kv_document) = self.documents.at(at, at.kv());
        qo_document.eq(kv_document) & has_qo_document & has_kv_document
    }
}

/// Multi-item scoring (FlashInfer): several items after one prompt, invisible to each other. The query at `p` sees the
/// key at `j <= p` if `p < prefix_len`, or `j < prefix_len`, or `p - j < place[p - prefix_len]`.
///
/// `place` is the token's index in its item, from 0 at the delimiter, which sees only the prefix and not itself.
#[derive(Debug, Clone, PartialEq)]
pub struct MultiItemScoring {
    prefix_lens: Vec<f32>,
    places: RequestLists,
}

impl MultiItemScoring {
    /// `prefix_lens`: `[requests]`. `places[r][t]`: the index in its item of the token at position `prefix_len + t` of
    /// request `r`; a token without one is a delimiter.
    ///
    /// # Errors
    /// When the numbers of lists and prefixes differ, or a number, or the total number of places, is not below 2^24.
    pub fn new(prefix_lens: &[u32], places: &[Vec<u32>]) -> Result<Self> {
        const OPERATOR: &str = "attention.multi_item_scoring";
        crate::ensure!(
            prefix_lens.len() == places.len(),
            OPERATOR,
            "places has {} lists, expected one for each of the {} prefixes",
            places.len(),
            prefix_lens.len()
        );
        Ok(Self {
            prefix_lens: checked_lens(OPERATOR, prefix_lens)?,
            places: RequestLists::new(OPERATOR, ["places", "place_starts"], places)?,
        })
    }
}

impl Variant for MultiItemScoring {
    fn name(&self) -> &str {
        "multi_item_scoring"
    }

    #[inline(always)]
    fn mask<N: Number>(&self, at: &At<N>) -> N::Bool {
        let (qo, kv) = (at.qo(), at.kv());
        let prefix_len = at.read("item_prefix_lens", &self.prefix_lens, at.request());
        let (place, has_place) = self.places.at(at, qo - prefix_len);
        let same_item = has_place & (qo - kv).lt(place);
        kv.le(qo) & (qo.lt(prefix_len) | kv.lt(prefix_len) | same_item)
    }
}
