//! Queries, keys and values of this rank's heads: from one product, or from three where something is done to them before
//! they meet, or where they are of two texts.

use std::sync::Arc;

use guildhall_tensor::{Device, Var};

use super::linear::{Cut, Linear, LinearShape};
use super::norm::HeadNorm;
use super::{HeadsKind, QueryKeyNorm, Sizes};
use crate::parallel::{Mesh, Parameters, Weight};

/// Weights of queries, keys and values.
#[derive(Debug)]
pub(super) enum Projections {
    /// Side by side.
    Fused(Box<Fused>),
    Apart(Box<Apart>),
}

#[derive(Debug)]
pub(super) struct Fused {
    /// Of this rank's heads: of all three, or of queries.
    own: Linear,
    shared: Option<SharedHeads>,
}

#[derive(Debug)]
pub(super) struct Apart {
    queries: Linear,
    keys: Linear,
    values: Linear,
    /// Where heads of keys and values are fewer than ranks: which of all outputs of keys, and of values, are used here.
    rows: Option<Vec<u32>>,
    /// Of queries and keys.
    norms: Option<[HeadNorm; 2]>,
}

/// Where heads of keys and values are fewer than ranks: those of all heads, and which of their outputs are used here.
#[derive(Debug)]
struct SharedHeads {
    keys_values: Linear,
    rows: Vec<u32>,
}

/// What the linear layers of one attention are made from.
pub(super) struct Maker<'a> {
    pub(super) device: &'a Arc<Device>,
    pub(super) name: &'a str,
    pub(super) sizes: &'a Sizes,
    pub(super) mesh: &'a Mesh,
    pub(super) heads: HeadsKind,
}

impl Maker<'_> {
    fn linear(&self, parts: &[(&str, usize)], cut: Cut) -> Linear {
        let name = |part: &str| format!("{}.{part}_proj", self.name);
        let outputs: Vec<_> = parts.iter().map(|(part, heads)| (name(part), heads * self.heads.head_dim)).collect();
        let shape = LinearShape { outputs: &outputs, inputs: self.sizes.model.d_model, cut };
        Linear::new(self.device, shape, self.sizes.dtype, (self.sizes.init(), self.heads.biases))
    }

    /// Which outputs of keys belong to the one head that this rank's queries read, if its ranks share heads.
    fn shared_rows(&self) -> Option<Vec<u32>> {
        let (rank, ranks) = (self.mesh.tensor.rank(), self.mesh.tensor.size());
        let HeadsKind { kv_heads, head_dim, .. } = self.heads;
        let first = rank * kv_heads / ranks * head_dim;
        (!kv_heads.is_multiple_of(ranks)).then(|| (first as u32..(first + head_dim) as u32).collect())
    }

    fn fused(&self) -> Fused {
        let HeadsKind { heads, kv_heads, head_dim, .. } = self.heads;
        let [q, k, v] = [("q", heads), ("k", kv_heads), ("v", kv_heads)];
        let Some(keys) = self.shared_rows() else {
            return Fused { own: self.linear(&[q, k, v], Cut::Outputs(self.mesh)), shared: None };
        };
        let values = keys.iter().map(|row| row + (kv_heads * head_dim) as u32);
        let rows = keys.iter().copied().chain(values).collect();
        let shared = Some(SharedHeads { keys_values: self.linear(&[k, v], Cut::Shared), rows });
        Fused { own: self.linear(&[q], Cut::Outputs(self.mesh)), shared }
    }

    fn apart(&self) -> Apart {
        let rows = self.shared_rows();
        let cut = if rows.is_some() { Cut::Shared } else { Cut::Outputs(self.mesh) };
        let norm = |part: &str| {
            let name = format!("{}.{part}_norm", self.name);
            HeadNorm::new(self.device, &name, self.heads.head_dim, self.sizes)
        };
        Apart {
            queries: self.linear(&[("q", self.heads.heads)], Cut::Outputs(self.mesh)),
            keys: self.linear(&[("k", self.heads.kv_heads)], cut),
            values: self.linear(&[("v", self.heads.kv_heads)], cut),
            rows,
            norms: (self.heads.query_key_norm == QueryKeyNorm::Head).then(|| ["q", "k"].map(norm)),
        }
    }
}

impl Projections {
    /// For tokens that attend to tokens of the same text.
    pub(super) fn of_one_text(maker: &Maker) -> Projections {
        match maker.heads.query_key_norm {
            QueryKeyNorm::None => Projections::Fused(Box::new(maker.fused())),
            QueryKeyNorm::Head | QueryKeyNorm::Width => Projections::of_two_texts(maker),
        }
    }

    /// For tokens that attend to tokens of another text.
    pub(super) fn of_two_texts(maker: &Maker) -> Projections {
        Projections::Apart(Box::new(maker.apart()))
    }

    /// Of all tokens x `[T, D]`: queries, keys and values, in one value or in three. Keys and values are of `memory`'s
    /// tokens, if there are such.
    ///
    /// # Panics
    /// On a memory where projections are of one text.
    pub(super) fn of(&self, x: &Var, memory: Option<&Var>) -> Vec<Var> {
        match self {
            Projections::Fused(fused) => {
                assert!(memory.is_none(), "queries and keys of two texts are not of one product");
                vec![fused.forward(x)]
            }
            Projections::Apart(apart) => apart.forward([x, memory.unwrap_or(x)]),
        }
    }

    /// Of tokens that attend to those of another text.
    ///
    /// # Panics
    /// As [`Projections::of`]; so for what follows.
    pub(super) fn queries(&self, x: &Var) -> Var {
        self.apart().queries(x)
    }

    /// Of the tokens of another text.
    pub(super) fn keys_values(&self, memory: &Var) -> [Var; 2] {
        self.apart().keys_values(memory)
    }

    fn apart(&self) -> &Apart {
        match self {
            Projections::Fused(_) => panic!("queries and keys of two texts are not of one product"),
            Projections::Apart(apart) => apart,
        }
    }
}

impl Fused {
    fn forward(&self, x: &Var) -> Var {
        match &self.shared {
            None => self.own.forward(x),
            Some(SharedHeads { keys_values, rows }) => self.own.forward_with(x, keys_values, rows),
        }
    }
}

impl Apart {
    /// Queries of one text's tokens, keys and values of another's.
    fn forward(&self, [of, to]: [&Var; 2]) -> Vec<Var> {
        let queries = self.queries(of);
        [queries].into_iter().chain(self.keys_values(to)).collect()
    }

    fn queries(&self, of: &Var) -> Var {
        let queries = self.queries.forward(of);
        self.norms.as_ref().map_or(queries.clone(), |[norm, _]| norm.forward(&queries))
    }

    fn keys_values(&self, to: &Var) -> [Var; 2] {
        let of_keys = |linear: &Linear| match &self.rows {
            None => linear.forward(to),
            Some(rows) => linear.forward_rows(to, rows),
        };
        let [keys, values] = [of_keys(&self.keys), of_keys(&self.values)];
        [self.norms.as_ref().map_or(keys.clone(), |[_, norm]| norm.forward(&keys)), values]
    }
}

impl Parameters for Projections {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        match self {
            Projections::Fused(fused) => {
                let Fused { own, shared } = &mut **fused;
                own.visit(f);
                shared.iter_mut().for_each(|shared| shared.keys_values.visit(f));
            }
            Projections::Apart(apart) => {
                let Apart { queries, keys, values, norms, .. } = &mut **apart;
                [queries, keys, values].into_iter().for_each(|linear| linear.visit(f));
                norms.iter_mut().flatten().for_each(|norm| norm.visit(f));
            }
        }
    }
}
