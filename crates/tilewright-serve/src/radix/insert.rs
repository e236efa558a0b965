//! Insertion of pages with deduplication.
//!
//! Invariant: after an insertion each passed page belongs to the tree or is among the duplicates; a failed insertion
//! changes nothing.

use super::{
    RadixTree,
    slab::{Node, NodeId},
};
use crate::pages::PageId;
use std::collections::HashSet;
use tilewright::{Result, ensure};

const OPERATOR: &str = "radix.insert";

/// The result of an insertion.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the caller must free the duplicates"]
pub struct Insertion {
    /// The node at the end of the inserted tokens; the root for no tokens.
    pub node: NodeId,
    /// Pages whose tokens the tree already has in other pages, in the passed order. The caller still owns them and
    /// frees them once it uses the tree's pages, which [`RadixTree::match_prefix`] returns.
    pub duplicates: Vec<PageId>,
}

impl RadixTree {
    /// Inserts `pages`, which hold the KV of `tokens`.
    ///
    /// The tree takes ownership of the new pages. A page that it already has for the same tokens may be passed again,
    /// as a request does with its matched prefix; it is ignored. Like [`match_prefix`](Self::match_prefix) this updates
    /// the access time of the path and may split an edge. It locks nothing.
    ///
    /// # Errors
    /// When `tokens` do not fill `pages` exactly, or a page is negative, passed twice, or in the tree for other tokens;
    /// the tree is unchanged then.
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
        let end = self.walk(tokens);
        let duplicates = self.duplicates(&end.pages, pages)?;
        let num_known = end.pages.len();
        let mut node = self.ensure_node(&end);
        if num_known < pages.len() {
            node = self.add_leaf(node, &tokens[num_known * self.page_size..], &pages[num_known..]);
        }
        Ok(Insertion { node: self.nodes.id(node), duplicates })
    }

    /// Checks the passed `pages` against the tree's pages for the same tokens (`known`, a prefix) and returns the
    /// redundant ones.
    fn duplicates(&self, known: &[PageId], pages: &[PageId]) -> Result<Vec<PageId>> {
        let mut seen = HashSet::new();
        let mut duplicates = Vec::new();
        for (i, &page) in pages.iter().enumerate() {
            if known.get(i) == Some(&page) {
                continue; // a second occurrence fails the `elsewhere` check
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

    /// Adds a leaf below `parent`, with the parent's access time.
    fn add_leaf(&mut self, parent: usize, tokens: &[u32], pages: &[PageId]) -> usize {
        self.remove_candidate(parent);
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
        self.add_candidate(leaf);
        leaf
    }
}
