"""Scripts that the tests run in a browser, and a name that contains markup."""

# The number of coloured pixels of every plot; axes and text are grey.
MARKS = """() => [...document.querySelectorAll('.plot')].map(plot => {
  const canvas = plot.querySelector('canvas');
  if (!canvas) return plot.querySelectorAll('rect.bar').length * 100;
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let marks = 0;
  for (let i = 0; i < pixels.length; i += 4) {
    const [r, g, b, a] = pixels.slice(i, i + 4);
    if (a > 40 && Math.max(r, g, b) - Math.min(r, g, b) > 25) marks++;
  }
  return marks;
})"""
PICTURE = """figure => [...document.querySelectorAll(`[data-figure=${figure}] canvas`)]
  .map(canvas => canvas.toDataURL()).join()"""
EVIL = "<img src=x onerror=window.pwned=1></script><script>window.pwned=1</script>"
