//! Pages enter the tree, and what the tree already has goes back to the caller.
//!
//! Invariant: every page that a caller brings is afterwards the tree's or among the duplicates, and a refused
//! insertion has changed nothing.

use std::collections::HashSet;

use tilewright::{Result, ensure};

use super::{
    RadixTree,
    node::{Node, NodeId},
};
use crate::pages::PageId;

const OPERATOR: &str = "radix.insert";

/// What an insertion made of the caller's pages.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the duplicates are the caller's to free"]
pub struct Insertion {
    /// The node where the inserted tokens end; the root for no tokens.
    pub node: NodeId,
    /// Pages for which the tree already has others, in the caller's order. They are still the caller's, to be
    /// freed as soon as he uses the tree's instead, which [`RadixTree::match_prefix`] tells.
    pub duplicates: Vec<PageId>,
}

impl RadixTree {
    /// Gives the tree the KV of `tokens`, which is in `pages`.
    ///
    /// The tree takes ownership of the pages that are new to it. A page that it has for these very tokens may be
    /// given again, as a request does with the prefix that it matched: nothing happens to it. Like
    /// [`match_prefix`](Self::match_prefix) this renews the access time of the path and may split an edge.
    /// It locks nothing.
    ///
    /// # Errors
    /// When `tokens` do not fill `pages` exactly, or a page is negative, is given twice, or is in the tree for
    /// other tokens; then nothing was changed.
    pub fn insert(&mut self, tokens: &[u32], pages: &[PageId]) -> Result<Insertion> {
        let fits =
            tokens.len().is_multiple_of(self.page_size) && tokens.len() / self.page_size == pages.len();
        ensure!(
            fits,
            OPERATOR,
            "tokens.len() = {} does not fill pages.len() = {} of {} tokens each",
            tokens.len(),
            pages.len(),
            self.page_size
        );
        let reached = self.walk(tokens);
        let duplicates = self.duplicates(&reached.pages, pages)?;
        let num_known = reached.pages.len();
        let mut node = self.settle(&reached);
        if num_known < pages.len() {
            node = self.grow(node, &tokens[num_known * self.page_size..], &pages[num_known..]);
        }
        Ok(Insertion { node: self.nodes.id(node), duplicates })
    }

    /// Checks the caller's `pages` against those that the tree has for the same tokens (`known`, a prefix), and
    /// returns the ones that are not needed.
    fn duplicates(&self, known: &[PageId], pages: &[PageId]) -> Result<Vec<PageId>> {
        let mut seen = HashSet::new();
        let mut duplicates = Vec::new();
        for (i, &page) in pages.iter().enumerate() {
            if known.get(i) == Some(&page) {
                continue; // if it is given a second time, that is elsewhere in the tree
            }
            ensure!(page >= 0, OPERATOR, "pages[{i}] = {page} is negative");
            ensure!(seen.insert(page), OPERATOR, "pages[{i}] = {page} is given twice");
            let elsewhere = self.pages.contains(&page);
            ensure!(!elsewhere, OPERATOR, "pages[{i}] = {page} is in the tree already, for other tokens");
            if i < known.len() {
                duplicates.push(page);
            }
        }
        Ok(duplicates)
    }

    /// Hangs a new leaf under `parent`, as recently used as its parent.
    fn grow(&mut self, parent: usize, tokens: &[u32], pages: &[PageId]) -> usize {
        self.retract(parent);
        let leaf = self.nodes.add(Node {
            parent: Some(parent),
            tokens: tokens.to_vec(),
            pages: pages.to_vec(),
            last_access: self.nodes[parent].last_access,
            ..Node::default()
        });
        self.nodes[parent].children.insert(tokens[..self.page_size].into(), leaf);
        self.pages.extend(pages);
        self.num_evictable += pages.len();
        self.propose(leaf);
        leaf
    }
}
